"""What becomes of the models of the suggestions, once for all tests."""

from __future__ import annotations

import functools

from tests.report.advice.cases import Case

import qfuse
from qfuse.report import Report
from qfuse.targets import Target


@functools.cache
def reports(case: Case) -> tuple[Report, Report]:
    """Return what becomes of the problem, and of the model that follows the suggestion."""
    inputs = case.inputs(), (case.better or case.inputs)()
    target = Target.for_testing()
    before = qfuse.explain(case.problem(), inputs[0], target=target, options=dict(case.options))
    return before, qfuse.explain(case.solution(), inputs[1], target=target)
