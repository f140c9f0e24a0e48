"""Replay a plan: compile as it was recorded, then apply what was edited in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from qfuse.ir.errors import OptionsError, PlanError
from qfuse.ir.events import Noted
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.ir.quant.spec import dtype_name, parse_dtype
from qfuse.options import Options, Prefer, choice
from qfuse.pipeline import Pipeline, Plan
from qfuse.plans import PlanData, find_edits
from qfuse.plans.fit import check_forced, check_versions, recorded_off
from qfuse.plans.wishes import planned_wishes


def replay_plan(
    pipeline: Pipeline, wanted: PlanData, captured: CapturedGraph, inputs: Sequence[torch.Tensor]
) -> Plan:
    """Plan as ``wanted`` says.

    The graph is rewritten without the edits first, where every site of the plan has to come up:
    otherwise the plan is not of this model. With edits it is rewritten again. Sites that are gone
    or new then follow from the edits.

    Raises:
        PlanError: The plan does not fit; the message says where and why.
        CaptureError, CheckError: As :meth:`qfuse.pipeline.Pipeline.plan`.
    """
    _check_backends(wanted, pipeline)
    notes = [*check_versions(wanted), *_machine_notes(wanted, pipeline)]
    off = recorded_off(wanted)
    loops = pipeline.cost.loops if wanted.loops is None else wanted.loops
    cost = replace(pipeline.cost, profile=wanted.profile, loops=loops)
    wishes = planned_wishes(wanted)
    pipeline = replace(pipeline, cost=cost, banned=off, wishes=wishes)
    plan = pipeline.plan(captured, inputs)
    assert plan.data is not None, "the pipeline records its decisions"
    edits = find_edits(wanted, plan.data, plan.lowered.log)
    notes += edits.notes
    if edits:
        forced = replace(wishes, forced=edits.forced)
        again = replace(pipeline, banned=off | edits.off, wishes=forced)
        plan = again.plan(captured, inputs)
        assert plan.data is not None, "the pipeline records its decisions"
        check_forced(edits, plan.data, plan.lowered.log)
        changed = f"sites off: {len(edits.off)}, kernels forced: {len(edits.forced)}"
        plan.lowered.log.add(Noted("plan", f"the plan was edited: {changed}"))
    for text in notes:
        plan.lowered.log.add(Noted("plan", text, warn=True))
    assert plan.data is not None, "the pipeline records its decisions"
    return replace(plan, data=_with_reasons(plan.data, wanted))


def _with_reasons(data: PlanData, wanted: PlanData) -> PlanData:
    """Return ``data`` with the reasons of ``wanted``, so that saving it gives the same plan."""
    known = {site.site: site.why for site in wanted.sites if not site.on and site.why}
    sites = (replace(s, why=known[s.site]) if s.site in known else s for s in data.sites)
    return replace(data, sites=tuple(sites))


def planned_options(
    wanted: PlanData, options: Options, float_dtype: torch.dtype | None
) -> tuple[Options, torch.dtype | None]:
    """Return the options of the plan, with how to compile and check from ``options``.

    Raises:
        OptionsError: An option that decides what is rewritten differs from both its default and
            the plan.
    """
    asked = {
        "without": (options.without, wanted.without, ()),
        "own_kernels": (options.own_kernels, wanted.own_kernels, True),
        "float_dtype": (_name(float_dtype), wanted.float_dtype, None),
        "prefer": (str(options.prefer), wanted.prefer, str(Options().prefer)),
        "float_memory": (options.float_memory, wanted.float_memory, Options().float_memory),
    }
    for name, (given, recorded, default) in asked.items():
        if given not in (recorded, default):
            raise OptionsError(
                f"{name} is {given!r}, and the plan was made with {recorded!r}",
                fix=f"leave {name} out, or make a new plan",
            )
    made = replace(
        options,
        without=wanted.without,
        own_kernels=wanted.own_kernels,
        prefer=choice(Prefer, wanted.prefer, "the plan's prefer"),
        float_memory=wanted.float_memory,
    )
    return made, None if wanted.float_dtype is None else parse_dtype(wanted.float_dtype)


def _check_backends(wanted: PlanData, pipeline: Pipeline) -> None:
    names = tuple(backend.name for backend in pipeline.extensions.backends)
    if names != wanted.backends:
        made = ", ".join(wanted.backends) or "none of another package"
        raise PlanError(
            f"the plan was made with another backend: {made}",
            fix="give the same backend in options, or make a new plan",
        )


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None or dtype is torch.float32 else dtype_name(dtype)


def _machine_notes(wanted: PlanData, pipeline: Pipeline) -> list[str]:
    then, now = wanted.target, pipeline.target
    notes = []
    if then.threads != now.threads:
        notes.append(
            f"the plan was made for {then.threads} threads, and this process has {now.threads}"
        )
    lacking = sorted(then.features - now.features)
    if lacking:
        notes.append(f"the plan was made for a CPU with {', '.join(lacking)}, which this one lacks")
    return notes
