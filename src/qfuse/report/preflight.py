"""The findings about a machine with what they cost one model, and what the model itself costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qfuse.cost import seconds_text
from qfuse.ir.events import MissCode
from qfuse.report.report import Report
from qfuse.targets import Affects, Finding, KernelState, Level, Target

Cost = tuple[str, float | None]
"""What a finding costs, in words and in predicted seconds per call."""


@dataclass(frozen=True, slots=True)
class ModelFinding:
    """A finding, and what it costs one model.

    Attributes:
        level: Severity.
        what: The subject, in a few words.
        detail: The observation.
        cost: What it costs this model, in words.
        predicted_seconds: The same in seconds per call, where the cost model knows it.
        fix: What to do; "" if no action is needed.
    """

    level: Level
    what: str
    detail: str
    cost: str
    predicted_seconds: float | None = None
    fix: str = ""

    @property
    def costs_nothing(self) -> bool:
        """Whether it is known to cost this model no time."""
        return self.predicted_seconds == 0

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def preflight(
    report: Report, findings: Sequence[Finding], target: Target
) -> tuple[ModelFinding, ...]:
    """Return what keeps a model from its speed: first breakage, then the most expensive.

    What costs this model nothing comes last.

    Args:
        report: Of the model, explained on this machine.
        findings: Of the machine, by :func:`qfuse.targets.diagnose`. What is fine is left out.
        target: The machine.
    """
    of_model = [_without_kernel(report)] if _unclaimed(report) else []
    # A missing kernel library is a warning of the report, with its own reason.
    of_model += _missing_library(report)
    of_machine = [_finding(one, report, target) for one in findings if one.level is not Level.OK]
    order = [Level.BAD, Level.WARN, Level.OK]
    return tuple(
        sorted(
            [*of_model, *of_machine],
            key=lambda one: (
                one.costs_nothing,
                order.index(one.level),
                -(one.predicted_seconds or 0.0),
            ),
        )
    )


def _unclaimed(report: Report) -> bool:
    return any(event.failed or event.dequantized for event in (*report.expanded, *report.fused))


def _without_kernel(report: Report) -> ModelFinding:
    actions = [a for a in report.actions if a.code is MissCode.NO_KERNEL]
    seconds = sum(action.seconds or 0.0 for action in actions)
    failed = [e for e in (*report.expanded, *report.fused) if e.failed or e.dequantized]
    reasons = "; ".join(dict.fromkeys(f"{a.tried}: {a.reason}" for a in actions))
    fixes = [action.advice.do for action in actions if action.advice is not None]
    return ModelFinding(
        Level.WARN,
        "quantized ops without a kernel",
        f"{len(failed)} of them compute in float: {reasons or 'float is as fast'}",
        f"predicted {seconds_text(seconds)}",
        seconds,
        fixes[0] if fixes else "see `qfuse explain --verbose`",
    )


def _missing_library(report: Report) -> list[ModelFinding]:
    texts = [note.text for note in report.notes if note.warn and "own kernels" in note.text]
    loss = sum(a.seconds or 0.0 for a in report.actions if a.code is MissCode.NO_KERNEL)
    cost = f"predicted {seconds_text(loss)}, and what PyTorch's kernels are slower"
    fix = "run `qfuse build-kernels`: it builds them, or says what is missing"
    return [ModelFinding(Level.BAD, "qfuse's kernels", text, cost, loss, fix) for text in texts]


def _finding(one: Finding, report: Report, target: Target) -> ModelFinding:
    cost, seconds = _cost(one.affects, report, target)
    return ModelFinding(one.level, one.what, one.detail, cost, seconds, one.fix)


def _cost(affects: Affects, report: Report, target: Target) -> Cost:
    match affects:
        case Affects.INDUCTOR:
            return _inductor(report)
        case Affects.THREADS:
            return _threads(report, target)
        case Affects.DECLARED_KERNELS:
            return _declared(report, target)
        case Affects.OWN_KERNELS:
            return _own_kernels(report)
        case Affects.AVOIDED:
            return "nothing: qfuse.compile does not use it there", 0.0
        case Affects.MACHINE:
            return _machine(report)


def _inductor(report: Report) -> Cost:
    work = report.work
    if work is None or not work.quantized_products:
        return "nothing: no product is quantized", 0.0
    lost = seconds_text(max(work.float_seconds - work.predicted_seconds, 0.0))
    return f"nothing with qfuse.compile; with Inductor up to {lost} per call", 0.0


def _machine(report: Report) -> Cost:
    work = report.work
    if work is None:
        return "nothing: no product is computed", 0.0
    # Speeds are measured on the machine as it is.
    whole = seconds_text(work.predicted_seconds)
    return f"a part of the predicted {whole}, which is for this machine as it is", None


def _threads(report: Report, target: Target) -> Cost:
    work = report.work
    if work is None:
        return "not predicted", None
    cores = max(min(target.usable_cores, target.cores), 1)
    lost = work.predicted_seconds * (1 - min(target.threads / cores, 1.0))
    return f"at most {seconds_text(lost)} per call, if all cores were used", lost


def _own_kernels(report: Report) -> Cost:
    own = sum(count for name, count in report.kernels.items() if name.startswith("qfuse."))
    if own:
        return f"nothing now: {own} ops run on kernels that are built already", 0.0
    return "all of qfuse's kernels", None


def _declared(report: Report, target: Target) -> Cost:
    absent = {
        name.replace("::", ".")
        for name, state in target.kernels
        if state in {KernelState.SCHEMA_ONLY, KernelState.ABSENT}
    }
    asked = sum(any(name in absent for name, _ in event.losers) for event in report.fused)
    failed = [e for e in report.expanded if e.failed and any(n in absent for n, _ in e.losers)]
    if failed:
        return f"{len(failed)} ops that run in float could have used one", None
    return f"nothing: {asked} ops could have used one, and run on other kernels", 0.0
