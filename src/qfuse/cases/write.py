"""Write a directory for each rule that was rolled back."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from qfuse.cases.case import BACKEND_ORIGIN, CASE_FILE, GRAPH_FILE, MODEL_FILE, Case
from qfuse.cases.program import read_graph, save_program
from qfuse.extensions import OWN
from qfuse.ir.errors import USER_CODE_ERRORS, QfuseError
from qfuse.ir.events import Event, EventLog, RolledBack
from qfuse.ir.graph.stage_graph import MUTABLE_META, CapturedGraph
from qfuse.ir.graph.text import to_text
from qfuse.optimize import installed_rules
from qfuse.pipeline import EVERY_REWRITE, Pipeline, Plan

_log = logging.getLogger(__name__)

REPRO_VARIABLE = "QFUSE_REPRO"
# A wrong rule often fails at many sites, and each directory holds the weights.
_MOST = 4


def keep_cases(
    folder: Path | None,
    pipeline: Pipeline,
    captured: CapturedGraph,
    inputs: Sequence[torch.Tensor],
    plan: Plan,
) -> Plan:
    """Write a directory for the first roll-back of each rule, and name it in the events.

    Args:
        folder: Where to; by default that of the environment variable ``QFUSE_REPRO``, and nothing
            is written without both.
        pipeline: What the plan was made with.
        captured: The captured graph.
        inputs: Its flat example inputs.
        plan: The plan.

    Returns:
        The plan with a log that names the directories, or how to have them written. A directory
        that cannot be written does not fail the compilation: the event says why.
    """
    undone = plan.lowered.log.of(RolledBack)
    if not undone:
        return plan
    place = folder or (Path(os.environ[REPRO_VARIABLE]) if os.environ.get(REPRO_VARIABLE) else None)
    known: dict[str, str] = {}
    events: list[Event] = []
    for event in plan.lowered.log:
        if isinstance(event, RolledBack) and event.key != EVERY_REWRITE:
            if event.rule not in known:
                known[event.rule] = (
                    f"set {REPRO_VARIABLE}=FOLDER to keep what reproduces it"
                    if place is None
                    else "not kept: too many rules were rolled back"
                    if len(known) >= _MOST
                    else _keep(place, pipeline, captured, inputs, plan, event)
                )
            events.append(replace(event, repro=known[event.rule]))
        else:
            events.append(event)
    return replace(plan, lowered=replace(plan.lowered, log=EventLog(events)))


def _keep(
    folder: Path,
    pipeline: Pipeline,
    captured: CapturedGraph,
    inputs: Sequence[torch.Tensor],
    plan: Plan,
    event: RolledBack,
) -> str:
    """Write one directory; return the command that replays it, or why it could not be written."""
    try:
        return f"qfuse repro {_write(folder, pipeline, captured, inputs, plan, event)}"
    # What torch raises while it exports depends on the graph.
    except (*USER_CODE_ERRORS, QfuseError) as error:
        _log.warning("the case of %s cannot be written to %s: %s", event.key, folder, error)
        first = str(error).partition("\n")[0]
        return f"it could not be written to {folder}: {type(error).__name__}: {first}"


def _write(
    folder: Path,
    pipeline: Pipeline,
    captured: CapturedGraph,
    inputs: Sequence[torch.Tensor],
    plan: Plan,
    event: RolledBack,
) -> Path:
    text = to_text(captured.graph)
    digest = hashlib.sha256(f"{event.key}\n{event.reason}\n{text}".encode()).hexdigest()[:12]
    final = folder.expanduser().absolute() / f"{event.rule}-{digest}"
    final.parent.mkdir(parents=True, exist_ok=True)
    # Another folder first: what has the final name is complete.
    draft = Path(tempfile.mkdtemp(dir=final.parent, prefix=".writing-"))
    try:
        save_program(draft, captured, inputs)
        nodes = captured.graph.find_nodes(op="get_attr")
        written = tuple(str(node.target) for node in nodes if node.meta.get(MUTABLE_META))
        again = to_text(read_graph(draft / MODEL_FILE, written).graph)
        same = _in_order(again) == _in_order(text)
        case = _case(pipeline, plan, event, written, same_graph=same)
        case = replace(case, strides=tuple(tuple(value.stride()) for value in inputs))
        (draft / CASE_FILE).write_text(case.to_json(), encoding="utf-8")
        (draft / GRAPH_FILE).write_text(text + "\n", encoding="utf-8")
        draft.chmod(0o755)
        shutil.rmtree(final, ignore_errors=True)
        draft.replace(final)
    except BaseException:
        # Also on KeyboardInterrupt: nothing half-written stays.
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return final


def _in_order(text: str) -> list[str]:
    """Return the lines of a graph with its constants sorted, whose order means nothing."""
    return sorted(text.splitlines(), key=lambda line: line if line.startswith("const ") else "~")


def _case(
    pipeline: Pipeline,
    plan: Plan,
    event: RolledBack,
    written: tuple[str, ...],
    *,
    same_graph: bool,
) -> Case:
    assert plan.data is not None, "the pipeline records its decisions"
    where = next((p.source or p.module for p in event.places), "")
    if not where:
        where = next((s.where for s in plan.data.sites if s.site == event.key), "")
    return Case(
        event.rule,
        event.key,
        _origin(event.rule, pipeline),
        where,
        pipeline.check.value,
        event.reason,
        event.error,
        event.allowed,
        same_graph,
        written,
        (),
        plan.data,
    )


def _origin(rule: str, pipeline: Pipeline) -> str:
    """Return the distribution or the backend that a rule is of."""
    for some in installed_rules():
        if any(each.name == rule for each in some.value.rules):
            return some.origin
    for backend in pipeline.extensions.backends:
        if any(each.name == rule for some in backend.rules() for each in some.rules):
            return f"{BACKEND_ORIGIN}{backend.name}"
    return OWN
