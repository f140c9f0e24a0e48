"""A report as JSON, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Annotated, Any, Literal, Protocol

from pydantic import Discriminator, Tag, TypeAdapter, ValidationError

from qfuse.ir import events
from qfuse.ir.errors import OptionsError
from qfuse.ir.files import parse_json
from qfuse.report.facts import Facts

SCHEMA = 1
"""Version of the JSON; it grows when a field is renamed, removed or changes its meaning."""

_FIX = "write the file with report.to_json(), or with `qfuse explain MODEL --json FILE`"
_SHOWN_ERRORS = 3
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_NOT_FINITE = tuple(map(str, (math.inf, -math.inf, math.nan)))

KINDS: Mapping[str, type[events.Event]] = {
    kind.__name__.lower(): kind
    for kind in (
        events.Fired,
        events.Missed,
        events.Lowered,
        events.Estimated,
        events.Left,
        events.Noted,
        events.Checked,
        events.RolledBack,
    )
}
"""Every kind of event, by its name in JSON."""


def _kind(value: Any) -> str:
    return str(value.get("kind")) if isinstance(value, Mapping) else type(value).__name__.lower()


AnyEvent = Annotated[
    Annotated[events.Fired, Tag("fired")]
    | Annotated[events.Missed, Tag("missed")]
    | Annotated[events.Lowered, Tag("lowered")]
    | Annotated[events.Estimated, Tag("estimated")]
    | Annotated[events.Left, Tag("left")]
    | Annotated[events.Noted, Tag("noted")]
    | Annotated[events.Checked, Tag("checked")]
    | Annotated[events.RolledBack, Tag("rolledback")],
    Discriminator(_kind),
]


@dataclass(frozen=True, slots=True)
class ReportData:
    """What a report is read from. Everything else in the JSON is derived from it."""

    schema: Literal[1]
    facts: Facts
    events: tuple[AnyEvent, ...]


class Recorded(Protocol):
    """What a report consists of: a ``Report``, or what :func:`read_report` returned."""

    @property
    def facts(self) -> Facts:
        """Facts about the whole compilation."""

    @property
    def events(self) -> tuple[events.Event, ...]:
        """All events, in the order in which they happened."""


def event_data(event: events.Event) -> dict[str, Any]:
    """Return an event as plain data, with its kind."""
    return {"kind": type(event).__name__.lower(), **asdict(event)}


def finite(value: Any) -> Any:
    """Return plain data in which numbers that JSON lacks are texts: ``"nan"``, ``"inf"``."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, (list, tuple)) else value


def read_report(text: str | bytes) -> ReportData:
    """Parse the JSON of a report.

    Raises:
        OptionsError: The text is not a report, or one of a newer version of qfuse.
    """
    try:
        found = parse_json(text)
    except ValueError as error:
        raise OptionsError(f"this is not JSON: {error}", fix=_FIX) from error
    version = found.get("schema") if isinstance(found, dict) else None
    if isinstance(version, bool) or not isinstance(version, int):
        raise OptionsError("this JSON is not a report of qfuse: it has no schema", fix=_FIX)
    if version != SCHEMA:
        made = found.get("facts")
        by = made.get("qfuse_version") if isinstance(made, dict) else None
        raise OptionsError(
            f"the report has schema {version}, and this qfuse reads schema {SCHEMA}",
            where=f"written by qfuse {by}" if by else None,
            fix="upgrade qfuse" if version > SCHEMA else "make the report again with this qfuse",
        )
    try:
        return _adapter().validate_python(found)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, one['loc']))}: {one['msg']}"
            for one in error.errors()[:_SHOWN_ERRORS]
        ]
        raise OptionsError(f"the report is damaged: {'; '.join(problems)}", fix=_FIX) from error


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a report's facts and events, with the kind of every event.

    A number may be one of the texts of :func:`finite`.
    """
    schema: dict[str, Any] = {"$schema": _DIALECT, **_with_texts(_adapter().json_schema())}
    for name, kind in ((kind.__name__, name) for name, kind in KINDS.items()):
        definition = schema["$defs"][name]
        definition["properties"] = {"kind": {"const": kind}, **definition["properties"]}
        definition["required"] = ["kind", *definition["required"]]
    return schema


def _with_texts(schema: Any) -> Any:
    """Return a schema whose numbers may be texts."""
    if isinstance(schema, list):
        return [_with_texts(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _with_texts(value) for name, value in schema.items()}
    if made.get("type") == "number":
        del made["type"]
        made["anyOf"] = [{"type": "number"}, {"enum": list(_NOT_FINITE)}]
    return made


@cache
def _adapter() -> TypeAdapter[ReportData]:
    return TypeAdapter(ReportData)
