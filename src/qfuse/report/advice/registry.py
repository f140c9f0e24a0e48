"""All suggestions; the first that answers a cause is shown."""

from __future__ import annotations

from collections.abc import Mapping

from qfuse.ir.events import MissCode
from qfuse.report.advice.advice import Advice, Cause

ADVICE: tuple[Advice, ...] = (
    Advice(
        "quantize-weight",
        "quantize it: quantize_(model, Int8DynamicActivationInt8WeightConfig())",
        {MissCode.NOT_QUANTIZED},
        "weight is not quantized",
    ),
)

NEEDS_NONE: Mapping[MissCode, str] = {}
"""Codes without a suggestion, each with the reason."""


def advice_for(cause: Cause) -> Advice | None:
    """Return the suggestion for a cause, if there is one that helps."""
    return next((advice for advice in ADVICE if advice.answers(cause)), None)
