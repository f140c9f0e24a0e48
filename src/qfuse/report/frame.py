"""The report as a data frame."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from qfuse.ir.errors import OptionsError
from qfuse.ir.events import Estimated, Event, Left, Lowered
from qfuse.report.work import float_seconds_of

_TEXTS = ("node", "op", "module", "source", "kind", "kernel", "what", "reason")

COLUMNS: Mapping[str, type] = MappingProxyType(
    {
        **dict.fromkeys(_TEXTS, str),
        "predicted_seconds": float,
        "float_seconds": float,
        "multiply_adds": int,
    }
)
"""The columns of the frame, with the type of their values; what is not known is NaN."""


def frame_rows(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return one row per lowered op (``lowered``) and per quantize or dequantize (``left``)."""
    known = list(events)
    estimates = {e.place.node: e for e in known if isinstance(e, Estimated)}
    return [
        dict(zip(COLUMNS, _values(event, estimates.get(event.place.node)), strict=True))
        for event in known
        if isinstance(event, (Lowered, Left))
    ]


def _values(event: Lowered | Left, estimate: Estimated | None) -> tuple[Any, ...]:
    place, kind = event.place, type(event).__name__.lower()
    lowered = event if isinstance(event, Lowered) else None
    seconds = None if estimate is None else float_seconds_of(estimate, lowered)
    size = 0 if estimate is None else estimate.multiply_adds
    head = (place.node, place.op, place.module, place.source, kind)
    if isinstance(event, Lowered):
        return (*head, event.kernel, event.what, event.why, event.predicted, seconds, size)
    return (*head, "", "", event.reason, seconds, seconds, size)


def to_frame(events: Iterable[Event]) -> Any:
    """Return the rows as a ``pandas.DataFrame``.

    Raises:
        OptionsError: pandas is not installed.
    """
    return typed_frame(frame_rows(events), COLUMNS)


def typed_frame(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, type]) -> Any:
    """Return rows as a ``pandas.DataFrame`` whose columns have types of their own.

    pandas infers them from the values: a column without numbers, or without rows, would be one of
    objects, which cannot be summed or joined with that of another report.

    Raises:
        OptionsError: pandas is not installed.
    """
    frame = import_pandas().DataFrame(list(rows), columns=list(columns))
    return frame.astype(dict(columns))


def import_pandas() -> Any:
    """Return the module pandas, which only data frames need.

    Raises:
        OptionsError: It is not installed.
    """
    try:
        return importlib.import_module("pandas")
    except ImportError as error:
        raise OptionsError(
            "to_dataframe needs pandas, which is not installed",
            fix="pip install pandas, or use to_dict()",
        ) from error
