"""A rewrite that may not happen: the report says who decided so."""

from __future__ import annotations

from qfuse.rewrite.budget import RewriteBudget


def test_who_banned_a_rewrite_is_told() -> None:
    budget = RewriteBudget(
        banned=frozenset({"optimize/a", "optimize/b@x", "optimize/c@x"}),
        by_options=frozenset({"optimize/a"}),
        by_plan=frozenset({"optimize/b@x"}),
    )
    assert budget.why_banned("optimize/a@x") == "it is switched off by an option"
    assert budget.why_banned("optimize/b@x") == "it is off in the plan"
    assert budget.why_banned("optimize/c@x") == "it changed values here and was rolled back"
