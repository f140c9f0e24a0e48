"""As much of JSON Schema as the schema of a report uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_TYPES: Mapping[str, Any] = {
    "array": list,
    "boolean": bool,
    "integer": int,
    "null": type(None),
    "number": (int, float),
    "object": dict,
    "string": str,
}
_CHECKED = {
    *("$ref", "anyOf", "const", "enum", "items", "maxItems", "minItems", "oneOf", "prefixItems"),
    *("properties", "required", "type"),
}
_SAID = {"$defs", "$schema", "default", "description", "title"}


def violations(data: Any, schema: Mapping[str, Any]) -> list[str]:
    """Return what in ``data`` a schema does not allow, each with its place."""
    return list(_violations(data, schema, schema, "report"))


def _violations(
    data: Any, schema: Mapping[str, Any], root: Mapping[str, Any], at: str
) -> Iterator[str]:
    unknown = set(schema) - _CHECKED - _SAID
    assert not unknown, f"{unknown} in a schema are not checked"
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        yield from _violations(data, root["$defs"][name], root, at)
    yield from (f"{at}: {data!r} {text}" for text in _violations_of_value(data, schema))
    for several in ("anyOf", "oneOf"):
        fits = [not list(_violations(data, one, root, at)) for one in schema.get(several, ())]
        if fits and not (sum(fits) == 1 if several == "oneOf" else any(fits)):
            yield f"{at}: {data!r} fits {sum(fits)} of {len(fits)}"
    if isinstance(data, dict):
        yield from (f"{at}: no {n}" for n in schema.get("required", ()) if n not in data)
        for name, one in schema.get("properties", {}).items():
            if name in data:
                yield from _violations(data[name], one, root, f"{at}.{name}")
    if isinstance(data, list):
        yield from _violations_of_items(data, schema, root, at)


def _violations_of_value(data: Any, schema: Mapping[str, Any]) -> Iterator[str]:
    if "const" in schema and data != schema["const"]:
        yield f"is not {schema['const']!r}"
    if "enum" in schema and data not in schema["enum"]:
        yield f"is none of {schema['enum']}"
    if "type" in schema and not _has_type(data, schema["type"]):
        yield f"is not of type {schema['type']}"


def _violations_of_items(
    data: list[Any], schema: Mapping[str, Any], root: Mapping[str, Any], at: str
) -> Iterator[str]:
    least, most = schema.get("minItems", 0), schema.get("maxItems", len(data))
    if not least <= len(data) <= most:
        yield f"{at}: {len(data)} entries"
    first = schema.get("prefixItems", [])
    for index, value in enumerate(data):
        one = first[index] if index < len(first) else schema.get("items", {})
        yield from _violations(value, one, root, f"{at}.{index}")


def _has_type(data: Any, name: str) -> bool:
    if isinstance(data, bool):
        return name == "boolean"
    return isinstance(data, _TYPES[name])
