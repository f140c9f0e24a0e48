"""The facts of a case, and the files of its directory.

A directory holds ``case.json`` (this), ``model.pt2`` (the captured graph with its constants,
written by ``torch.export.save``), ``inputs.safetensors`` and ``graph.txt``. ``model.pt2`` is read
by ``torch.export.load``, which may unpickle: open directories of people whom you trust. Nothing
else is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from qfuse.ir.errors import CaseError, PlanError
from qfuse.ir.files import parse_json
from qfuse.plans import PlanData, read_plan

FORMAT = "qfuse-case"
VERSION = 1
CASE_FILE = "case.json"
MODEL_FILE = "model.pt2"
INPUTS_FILE = "inputs.safetensors"
GRAPH_FILE = "graph.txt"
BACKEND_ORIGIN = "the backend "


@dataclass(frozen=True, slots=True)
class Case:
    """A rewrite that changed values.

    Attributes:
        rule: Name of the rule.
        key: Key of the rewrite: ``stage/rule@node``.
        origin: The distribution that the rule is of, with its version.
        where: The line of the user's source, or "".
        check: The check that found it: ``site`` or ``pipeline``.
        reason: What was wrong.
        error: The error in the measure that decided, if it was measured.
        allowed: The bound on ``error``.
        same_graph: Whether the graph that ``model.pt2`` holds reads back as the same text.
        written: Names of the buffers that the model writes, which are not constants.
        strides: Strides of each input.
        plan: The compilation that found it: options, versions, machine, speeds.
    """

    rule: str
    key: str
    origin: str
    where: str
    check: str
    reason: str
    error: float | None
    allowed: float | None
    same_graph: bool
    written: tuple[str, ...]
    strides: tuple[tuple[int, ...], ...]
    plan: PlanData

    def to_json(self) -> str:
        """Return the facts as text for :func:`read_case`."""
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "plan"}
        head = {"format": FORMAT, "version": VERSION}
        return json.dumps({**head, **data, "plan": self.plan.to_dict()}, indent=2) + "\n"


_KINDS: Mapping[str, Any] = {
    **dict.fromkeys(("rule", "key", "origin", "where", "check", "reason"), str),
    **dict.fromkeys(("error", "allowed"), (int, float, type(None))),
    "same_graph": bool,
    **dict.fromkeys(("written", "strides"), list),
    "plan": Mapping,
}


def read_case(folder: Path) -> Case:
    """Read the facts of a directory.

    Raises:
        CaseError: It is not a directory of a case, or a file is missing or malformed.
    """
    where = str(folder)
    for name in (CASE_FILE, MODEL_FILE, INPUTS_FILE):
        if not (folder / name).is_file():
            raise CaseError(
                f"there is no {name}, so this is not a directory that qfuse wrote",
                where=where,
                fix="give the directory that the report names",
            )
    try:
        data = parse_json((folder / CASE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CaseError(f"{CASE_FILE} cannot be read: {error}", where=where) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CaseError(f"{CASE_FILE} is not of qfuse", where=where)
    if data.get("version") != VERSION:
        raise CaseError(
            f"it has version {data.get('version')!r} of the format, and this qfuse reads {VERSION}",
            where=where,
            fix="use the version of qfuse that wrote it",
        )
    for name, kind in _KINDS.items():
        if not isinstance(data.get(name), kind) or (name not in data):
            raise CaseError(f"{name!r} of {CASE_FILE} is missing or malformed", where=where)
    try:
        plan = read_plan(data["plan"])
        strides = tuple(tuple(int(step) for step in each) for each in data["strides"])
    except (PlanError, TypeError, ValueError) as error:
        raise CaseError(f"{CASE_FILE} is malformed: {error}", where=where) from error
    plain = {name: data[name] for name in _KINDS if name not in {"plan", "strides", "written"}}
    return Case(**plain, written=tuple(map(str, data["written"])), strides=strides, plan=plan)
