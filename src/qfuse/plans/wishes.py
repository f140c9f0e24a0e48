"""What a plan asks of lowering, before its edits."""

from __future__ import annotations

from qfuse.cost.times import Times
from qfuse.lower import FloatPolicy, Wishes
from qfuse.plans.data import PlanData

_MB = 1_000_000


def planned_wishes(plan: PlanData) -> Wishes:
    """Return when products run in float, and the recorded times.

    Nothing is measured, so that the same kernels are chosen.
    """
    times = Times({product: dict(seconds) for product, seconds in plan.times.items()})
    return Wishes({}, FloatPolicy(plan.prefer == "speed", plan.float_memory * _MB), times)
