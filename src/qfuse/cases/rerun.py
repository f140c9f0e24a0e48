"""Run a case again, and say whether the rewrite still changes values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from qfuse import kernels
from qfuse.backends import chosen_backends
from qfuse.cases.case import BACKEND_ORIGIN, Case, read_case
from qfuse.cases.program import load_program
from qfuse.cost import CostModel
from qfuse.extensions import OWN
from qfuse.ir.errors import CaseError, OptionsError
from qfuse.ir.events import Fired, RolledBack
from qfuse.ir.quant.spec import parse_dtype
from qfuse.optimize import installed_rules
from qfuse.options import BuiltinBackend, Check
from qfuse.pipeline import Extensions, Pipeline
from qfuse.plans import package_versions
from qfuse.plans.record import BY_PLAN
from qfuse.plans.wishes import planned_wishes
from qfuse.targets import Target


@dataclass(frozen=True, slots=True)
class Rerun:
    """What a run of a case found.

    Attributes:
        case: The case.
        event: The roll-back of the same rule, or ``None`` if it did not happen.
        fired: How often the rule fired and was kept.
        notes: What differs from the compilation that found it.
    """

    case: Case
    event: RolledBack | None
    fired: int
    notes: tuple[str, ...]

    @property
    def reproduces(self) -> bool:
        """Whether the rewrite still changes values."""
        return self.event is not None

    def __str__(self) -> str:
        case = self.case
        lines = [f"rule  {case.rule} (of {case.origin})", f"site  {case.key}"]
        if case.where:
            lines.append(f"at    {case.where}")
        lines.append(f"then  {_measured(case.reason, case.error, case.allowed)}")
        if self.event is not None:
            now = _measured(self.event.reason, self.event.error, self.event.allowed)
            lines.append(f"now   {now}")
            if self.event.key != case.key:
                lines.append(f"      at another site: {self.event.key}")
            lines.append("the difference is still there")
        else:
            kept = f"the rule fires {self.fired} times and values match"
            lines.append(f"now   {kept if self.fired else 'the rule does not fire any more'}")
            lines.append("the difference is not there any more")
        return "\n".join((*lines, *(f"note: {note}" for note in self.notes)))


def rerun_case(folder: Path) -> Rerun:
    """Rewrite the graph of a case with the same options, speeds and check.

    Raises:
        CaseError: The directory is malformed, or the package of the rule is not installed.
    """
    case = read_case(folder)
    _check_origin(case)
    captured, inputs = load_program(folder, case)
    pipeline, notes = _pipeline(case)
    # As qfuse.compile does.
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        plan = pipeline.plan(captured, inputs)
    log = plan.lowered.log
    undone = [event for event in log.of(RolledBack) if event.rule == case.rule]
    # The same site if it is among them.
    undone.sort(key=lambda event: event.key != case.key)
    fired = sum(event.rule == case.rule for event in log.of(Fired))
    if not case.same_graph:
        notes.append("the graph was not read back as it was when the case was written")
    return Rerun(case, undone[0] if undone else None, fired, tuple(notes))


def _pipeline(case: Case) -> tuple[Pipeline, list[str]]:
    plan, notes = case.plan, []
    target = Target.detect(extensions=False)
    lacking = sorted(plan.target.features - target.features)
    if lacking:
        notes.append(f"this CPU lacks {', '.join(lacking)}: kernels of this machine were used")
    else:
        target = plan.target
    now = package_versions(target)
    notes += [
        f"{name} was {then}, and is {now.get(name, 'not installed')}"
        for name, then in plan.versions.items()
        if now.get(name) != then
    ]
    library = kernels.KernelLibrary(False, "as in the compilation of the case")
    if plan.own_kernels:
        library = kernels.load()
        if not library.available:
            notes.append(f"qfuse's own kernels are not available: {library.reason}")
    try:
        backends = chosen_backends(plan.backends or BuiltinBackend.AUTO)
    except OptionsError as error:
        raise CaseError(error.what, fix="install the package of the backend") from error
    dtype = None if plan.float_dtype is None else parse_dtype(plan.float_dtype)
    pipeline = Pipeline(
        target,
        CostModel(plan.profile),
        library,
        Check(case.check),
        dtype,
        without=plan.without,
        extensions=Extensions.installed(library, backends),
        banned=frozenset(site.site for site in plan.sites if site.why == BY_PLAN),
        wishes=planned_wishes(plan),
    )
    return pipeline, notes


def _check_origin(case: Case) -> None:
    """Refuse a case whose rule is of a package that is not installed, or lacks it now."""
    if case.origin == OWN or case.origin.startswith(BACKEND_ORIGIN):
        return
    rules = {rule.name: some.origin for some in installed_rules() for rule in some.value.rules}
    if case.rule in rules:
        return
    name = case.origin.partition(" ")[0]
    here = [origin for origin in rules.values() if origin.partition(" ")[0] == name]
    state = f"which {here[0]} does not have" if here else "which is not installed"
    raise CaseError(
        f"the rule {case.rule} is of {case.origin}, {state}",
        fix=f"install {case.origin} and try again",
    )


def _measured(reason: str, error: float | None, allowed: float | None) -> str:
    if error is None or allowed is None or math.isnan(error):
        return reason
    return f"error {error:.4g}, allowed {allowed:.4g}: {reason}"
