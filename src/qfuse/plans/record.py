"""Record a compilation as a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from qfuse.ir.events import EventLog, Lowered, Place, RolledBack
from qfuse.plans.data import KernelChoice, Site
from qfuse.rewrite.budget import RewriteBudget

BY_PLAN = "switched off by the plan"
_TWICE = "this rule changed values more than once"


def record_plan(
    log: EventLog, budget: RewriteBudget, requested: Collection[str], by_plan: Collection[str]
) -> tuple[tuple[Site, ...], tuple[KernelChoice, ...]]:
    """Return the sites and the kernels of a compilation.

    Args:
        log: Its events.
        budget: Its rewrite budget, after the last rewrite.
        requested: Keys that options had disabled, which are not listed.
        by_plan: Keys that a plan had switched off.
    """
    undone = {event.key: event for event in log.of(RolledBack)}
    sites = tuple(_sites(undone, budget, requested, by_plan))
    # The last event of an op is the one that holds.
    kernels = {
        event.place.node: KernelChoice(
            event.place.node, event.kernel, event.what, _where(event.place)
        )
        for event in log.of(Lowered)
    }
    return sites, tuple(kernels.values())


def _sites(
    undone: dict[str, RolledBack],
    budget: RewriteBudget,
    requested: Collection[str],
    by_plan: Collection[str],
) -> Iterator[Site]:
    times = Counter(budget.allowed)
    listed = set()
    # In the order in which the rewrites were proposed.
    for key, place in budget.places.items():
        event = undone.get(key)
        if key in budget.banned or event is not None:
            if key in requested:
                continue
            why = BY_PLAN if key in by_plan else f"rolled back: {event.reason}" if event else ""
            yield Site(key, False, place.op, _where(place), why=why or _TWICE)
        elif times[key]:
            yield Site(key, True, place.op, _where(place), times[key])
        else:
            continue
        listed.add(key)
    for key in sorted({*budget.banned, *undone} - listed - set(requested)):
        event = undone.get(key)
        why = BY_PLAN if key in by_plan else f"rolled back: {event.reason}" if event else _TWICE
        yield Site(key, False, why=why)


def _where(place: Place) -> str:
    return place.source or place.module
