"""Compare two plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qfuse.plans.data import PlanData

_OPTIONS = (
    "without",
    "own_kernels",
    "float_dtype",
    "backends",
    "prefer",
    "float_memory",
    "loops",
)


def diff_plans(one: PlanData, other: PlanData) -> list[str]:
    """Return the differences between two plans as lines; none if they make the same decisions.

    Lines begin with ``-`` for what only the first has, ``+`` for what only the second has, and
    ``~`` for what both have and decide differently. Speeds and lines of the source are
    not compared.
    """
    return [*_facts(one, other), *_sites(one, other), *_kernels(one, other)]


def _facts(one: PlanData, other: PlanData) -> Iterator[str]:
    yield from _entries("version of", one.versions, other.versions)
    for name in _OPTIONS:
        before, after = getattr(one, name), getattr(other, name)
        if before != after:
            yield f"~ option {name}: {before!r} -> {after!r}"
    yield from _entries("target", _machine(one), _machine(other))


def _machine(plan: PlanData) -> dict[str, Any]:
    data = plan.target.to_dict()
    return {name: data[name] for name in ("model", "features", "threads", "aten_capability")}


def _entries(what: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys((*one, *other)):
        before, after = one.get(name), other.get(name)
        if before != after:
            yield f"~ {what} {name}: {_text(before)} -> {_text(after)}"


def _text(value: object) -> str:
    if value is None:
        return "none"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _sites(one: PlanData, other: PlanData) -> Iterator[str]:
    before, after = ({site.site: site for site in plan.sites} for plan in (one, other))
    for key in dict.fromkeys((*before, *after)):
        a, b = before.get(key), after.get(key)
        if b is None:
            yield f"- site {key}"
        elif a is None:
            yield f"+ site {key}"
        elif a.on != b.on:
            yield f"~ site {key}: {_state(a.on)} -> {_state(b.on)}"


def _state(on: bool) -> str:
    return "on" if on else "off"


def _kernels(one: PlanData, other: PlanData) -> Iterator[str]:
    before, after = ({choice.op: choice for choice in plan.kernels} for plan in (one, other))
    for op in dict.fromkeys((*before, *after)):
        a, b = before.get(op), after.get(op)
        if b is None:
            yield f"- kernel of {op}: {before[op].kernel}"
        elif a is None:
            yield f"+ kernel of {op}: {b.kernel}"
        elif a.kernel != b.kernel:
            yield f"~ kernel of {op}: {a.kernel} -> {b.kernel}"
