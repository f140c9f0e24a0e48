"""Compare a plan with a compilation of the model that it is replayed on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qfuse._version import __version__
from qfuse.ir.errors import PlanError
from qfuse.ir.events import EventLog, Lowered, Missed
from qfuse.plans.data import PlanData, Site
from qfuse.plans.versions import release
from qfuse.rewrite.budget import rule_of

_REST = 5
_FIX = "compile without a plan and save a new one, or remove the entry from the plan"


@dataclass(frozen=True, slots=True)
class Edits:
    """What a plan asks for that a compilation would not do by itself.

    Attributes:
        off: Keys of the sites that were switched off by hand.
        forced: Kernels that were changed, by the name of the op's node.
        notes: What differs without being an error, as sentences.
    """

    off: frozenset[str]
    forced: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.off or self.forced)


def recorded_off(plan: PlanData) -> frozenset[str]:
    """Return the keys that the recorded compilation went without, such as rolled back ones."""
    return frozenset(site.site for site in plan.sites if not site.on and site.why)


def check_versions(plan: PlanData) -> tuple[str, ...]:
    """Return notes about other versions.

    Raises:
        PlanError: The plan was made with another version of torch.
    """
    import torch  # noqa: PLC0415 - plans are compared without it

    then, now = plan.versions.get("torch", ""), torch.__version__
    if then and release(then) != release(now):
        raise PlanError(
            f"the plan was made with torch {then}, and this is torch {now}, which may capture "
            "other graphs",
            fix="save a new plan; or remove torch from the versions of the plan to try it",
        )
    made = plan.versions.get("qfuse", "")
    if made and made != __version__:
        return (f"the plan was made with qfuse {made}, and this is qfuse {__version__}",)
    return ()


def find_edits(plan: PlanData, found: PlanData, log: EventLog) -> Edits:
    """Compare a plan with the compilation of the same model without its edits.

    Args:
        plan: The plan.
        found: The compilation: without the sites that the plan recorded as off.
        log: The events of the compilation.

    Raises:
        PlanError: A site or an op of the plan is not part of the compilation.
    """
    known = {site.site: site for site in found.sites}
    before = recorded_off(plan)
    mine = [site for site in plan.sites if site.site not in before]
    wrong = [site for site in mine if _differs(site, known)]
    if wrong:
        first = wrong[0]
        raise PlanError(
            f"{_count(len(wrong), 'site')} of the plan {_is(wrong)} not part of this model: "
            f"{first.site}: {_why(first, known, log)}{_others([site.site for site in wrong])}",
            where=first.where or None,
            fix=_FIX,
        )
    chosen = {choice.op: choice for choice in found.kernels}
    lost = [choice for choice in plan.kernels if choice.op not in chosen]
    if lost:
        raise PlanError(
            f"{_count(len(lost), 'op')} of the plan {_is(lost)} not part of this model: "
            f"{lost[0].op} ({lost[0].what}){_others([choice.op for choice in lost])}",
            where=lost[0].where or None,
            fix=_FIX,
        )
    forced = {c.op: c.kernel for c in plan.kernels if c.kernel != chosen[c.op].kernel}
    return Edits(
        frozenset(site.site for site in mine if not site.on), forced, tuple(_added(plan, found))
    )


def check_forced(edits: Edits, done: PlanData, log: EventLog) -> None:
    """Check that every forced kernel is used.

    Raises:
        PlanError: One is not: its op is gone because another site is off, or no kernel is asked
            for such an op, or the kernel changed values and was rolled back.
    """
    chosen = {choice.op: choice.kernel for choice in done.kernels}
    lowered = {event.place.node: event for event in log.of(Lowered)}
    for op, kernel in edits.forced.items():
        if chosen.get(op) == kernel:
            continue
        event = lowered.get(op)
        reason = "the op is not part of the graph any more, since other sites are off"
        if event is not None:
            said = [text for name, text in event.losers if name.startswith(kernel)]
            reason = said[0] if said else event.why or "no kernel is selected for such an op"
        raise PlanError(
            f"the plan runs {op} on {kernel}, which is not possible: {reason}",
            where=str(event.place) if event is not None else None,
            fix="restore the kernel in the plan",
        )


def _differs(site: Site, known: Mapping[str, Site]) -> bool:
    there = known.get(site.site)
    if there is None or not there.on or there.times < site.times:
        return True
    return bool(site.op and there.op != site.op)


def _why(site: Site, known: Mapping[str, Site], log: EventLog) -> str:
    there = known.get(site.site)
    if there is not None and there.on and there.times < site.times:
        return f"it happens {_times(there)} here, and {_times(site)} in the plan"
    if there is not None and there.on:
        return f"the node is now {there.op}, and was {site.op}"
    if there is not None:
        return there.why
    stage, _, rest = site.site.partition("/")
    rule, _, node = rest.partition("@")
    misses = [m for m in log.of(Missed) if m.rule == rule and m.anchor.node == node]
    if misses:
        return misses[-1].reason
    if not node:
        return "it is a whole rule, which can only be off"
    same = sum(rule_of(key) == f"{stage}/{rule}" for key in known)
    return f"the rule fires at {_count(same, 'other place')}, and not at a node of this name"


def _added(plan: PlanData, found: PlanData) -> list[str]:
    listed = {site.site: site for site in plan.sites}
    more = [site.site for site in found.sites if site.on and site.site not in listed]
    notes = []
    if more:
        text = f"{_count(len(more), 'rewrite')} not in the plan {_was(more)} applied"
        notes.append(f"{text}: {more[0]}{_others(more)}")
    for site in found.sites:
        planned = listed.get(site.site)
        if site.on and planned is not None and planned.times < site.times:
            often = f"{_times(site)}, and {_times(planned)} in the plan"
            notes.append(f"the rewrite {site.site} happens {often}")
    return notes


def _others(names: list[str]) -> str:
    rest = names[1 : _REST + 1]
    if not rest:
        return ""
    dots = ", ..." if len(names) > _REST + 1 else ""
    return f"; also {', '.join(rest)}{dots}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _times(site: Site) -> str:
    return "once" if site.times == 1 else f"{site.times} times"


def _is(things: Sequence[object]) -> str:
    return "is" if len(things) == 1 else "are"


def _was(things: list[str]) -> str:
    return "was" if len(things) == 1 else "were"
