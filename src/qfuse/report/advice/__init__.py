"""Suggestions: what to change in a model so that an op is fused."""

from qfuse.report.advice.advice import LOOKED_UP, OF_A_MODULE, OF_AN_EINSUM, Advice, Cause
from qfuse.report.advice.registry import ADVICE, NEEDS_NONE, advice_for

__all__ = [
    "ADVICE",
    "LOOKED_UP",
    "NEEDS_NONE",
    "OF_AN_EINSUM",
    "OF_A_MODULE",
    "Advice",
    "Cause",
    "advice_for",
]
