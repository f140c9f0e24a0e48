"""A plan says how often each rewrite happens, which a replay compares."""

from __future__ import annotations

import pytest

from qfuse.cost import CostProfile
from qfuse.ir.errors import PlanError
from qfuse.ir.events import EventLog
from qfuse.plans import PlanData, Site
from qfuse.plans.fit import find_edits
from qfuse.targets import Target


def plan_of(times: int, *, on: bool = True) -> PlanData:
    """A plan of one site."""
    site = Site("optimize/a@x", on, "linear", times=times)
    return PlanData({}, Target.for_testing(), CostProfile.pinned(), sites=(site,))


@pytest.mark.parametrize("on", [True, False])
def test_a_site_that_happens_less_often_is_an_error(on: bool) -> None:
    with pytest.raises(PlanError, match=r"a@x: it happens once here, and 7 times in the plan"):
        find_edits(plan_of(7, on=on), plan_of(1), EventLog(()))


def test_a_site_that_happens_more_often_is_noted() -> None:
    edits = find_edits(plan_of(1), plan_of(3), EventLog(()))
    assert edits.notes == ("the rewrite optimize/a@x happens 3 times, and once in the plan",)
    assert find_edits(plan_of(3), plan_of(3), EventLog(())).notes == ()
