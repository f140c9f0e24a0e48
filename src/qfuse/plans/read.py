"""Read a plan, and say which entry of it is malformed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qfuse.cost import CostProfile
from qfuse.cost.times import read_times
from qfuse.ir.errors import CacheError, OptionsError, PlanError
from qfuse.plans.data import FORMAT, VERSION, KernelChoice, PlanData, Site
from qfuse.targets import Target

_SITE = {"site": str, "on": bool, "op": str, "where": str, "times": int, "why": str, "note": str}
_KERNEL = {"op": str, "kernel": str, "what": str, "where": str, "note": str}
_TOP = ("versions", "target", "profile", "options", "sites", "kernels")
_OPTIONS = {
    "without": list,
    "own_kernels": bool,
    "float_dtype": (str, type(None)),
    "backends": list,
}
_SAVE = "save one with plan.save, or `qfuse compile --save-plan FILE`"
_LATER_OPTIONS = {"prefer": str, "float_memory": int, "loops": bool}


def read_plan(source: str | Path | Mapping[str, Any] | PlanData) -> PlanData:
    """Return the plan that a file or a mapping holds.

    Raises:
        PlanError: It cannot be read, is not a plan, or an entry is malformed.
    """
    if isinstance(source, PlanData):
        return source
    try:
        return _read(source)
    except RecursionError as error:
        raise PlanError(
            "the plan is nested too deeply to be one",
            where="the mapping" if isinstance(source, Mapping) else str(source),
            fix=_SAVE,
        ) from error


def _read(source: str | Path | Mapping[str, Any]) -> PlanData:
    if isinstance(source, Mapping):
        return _parse(source, "the mapping")
    if not isinstance(source, (str, Path)):
        raise PlanError(
            f"plan must be a path or a mapping, not {type(source).__name__}",
            fix='save one with model.plan.save("plan.json")',
        )
    try:
        data = json.loads(Path(source).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"the plan cannot be read: {error}", fix="check the path") from error
    except ValueError as error:
        raise PlanError(
            f"the plan is not JSON: {error}",
            where=str(source),
            fix=_SAVE,
        ) from error
    return _parse(data, str(source))


def _parse(data: object, where: str) -> PlanData:
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise PlanError("this is not a plan of qfuse", where=where, fix="save one with plan.save")
    if data.get("version") != VERSION:
        raise PlanError(
            f"the plan has version {data.get('version')!r} of the format, and this qfuse reads "
            f"{VERSION}",
            where=where,
            fix="save the plan again with this version of qfuse",
        )
    missing = [name for name in _TOP if name not in data]
    unknown = sorted(set(data) - {"format", "version", "note", "times", *_TOP})
    if missing or unknown:
        text = f"has no {missing[0]!r}" if missing else f"has an unknown entry {unknown[0]!r}"
        raise PlanError(f"the plan {text}", where=where)
    known = {**_OPTIONS, **_LATER_OPTIONS}
    options = _row(data["options"], known, tuple(_OPTIONS), f"{where}: options")
    try:
        target, profile = (
            Target.from_json(json.dumps(data["target"])),
            CostProfile.from_dict(data["profile"]),
        )
        times = read_times(data.get("times", {}))
    except (OptionsError, CacheError) as error:
        raise PlanError(error.what, where=where) from error
    return PlanData(
        _texts(data["versions"], f"{where}: versions"),
        target,
        profile,
        tuple(options["without"]),
        options["own_kernels"],
        options["float_dtype"],
        tuple(options["backends"]),
        tuple(_sites(data["sites"], where)),
        tuple(_kernels(data["kernels"], where)),
        **{name: options[name] for name in _LATER_OPTIONS if name in options},
        times=times,
    )


def _sites(rows: object, where: str) -> list[Site]:
    made = []
    for index, given in enumerate(_rows(rows, f"{where}: sites")):
        at = f"{where}: sites[{index}]"
        row = _row(given, _SITE, ("site", "on"), at)
        if "/" not in row["site"]:
            raise PlanError(f"site {row['site']!r} is not stage/rule@node", where=at)
        if row.get("times", 1) < 1:
            raise PlanError(
                f"'times' is {row['times']}, and a rewrite of a plan happens once or more",
                where=at,
                fix='set "on": false to switch the site off',
            )
        row.pop("note", None)
        made.append(Site(**row))
    _unique([site.site for site in made], "site", where)
    return made


def _kernels(rows: object, where: str) -> list[KernelChoice]:
    made = []
    for index, given in enumerate(_rows(rows, f"{where}: kernels")):
        row = _row(given, _KERNEL, ("op", "kernel"), f"{where}: kernels[{index}]")
        row.pop("note", None)
        made.append(KernelChoice(**row))
    _unique([choice.op for choice in made], "op", where)
    return made


def _unique(names: list[str], what: str, where: str) -> None:
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise PlanError(
            f"the {what} {twice} is listed twice", where=where, fix="remove one of the lines"
        )


def _rows(rows: object, where: str) -> list[Any]:
    if not isinstance(rows, (list, tuple)):
        raise PlanError(f"this must be a list, not {rows!r}", where=where)
    return list(rows)


def _row(
    row: object, known: Mapping[str, Any], needed: tuple[str, ...], where: str
) -> dict[str, Any]:
    """Return a copy of ``row`` if its entries have the known names and types."""
    if not isinstance(row, Mapping):
        raise PlanError(f"this must be an object, not {row!r}", where=where)
    for name in needed:
        if name not in row:
            raise PlanError(f"{name!r} is missing", where=where)
    for name, value in row.items():
        if name not in known:
            raise PlanError(f"{name!r} is unknown", where=where, fix=f"known: {', '.join(known)}")
        # A bool is an int in Python.
        if not isinstance(value, known[name]) or (known[name] is int and isinstance(value, bool)):
            raise PlanError(f"{name!r} has the wrong type: {value!r}", where=where)
    return dict(row)


def _texts(row: object, where: str) -> dict[str, str]:
    if not isinstance(row, Mapping) or not all(isinstance(v, str) for v in row.values()):
        raise PlanError("this must be an object of texts", where=where)
    return {str(name): value for name, value in row.items()}
