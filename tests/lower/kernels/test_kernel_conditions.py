"""What every kernel of qfuse declares: a condition that is broken is the one that is named."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from tests.support.conditions.broken import broken
from tests.support.conditions.problems import PROGRAMS, problems_of

from qfuse import kernels
from qfuse.lower.kernels.registry import all_kernels
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.conditions import Unmet
from qfuse.lower.select.kernel import Conditional

LIBRARY = kernels.KernelLibrary(available=True)
KERNELS: dict[str, Any] = {kernel.name: kernel for kernel in all_kernels(LIBRARY)}

ALWAYS = {
    # Floats have no zero point.
    ("qfuse.linear_w16a32", "the weight's zero point is an integer"),
    ("qfuse.linear_w16a32", "the weight's zero point is in the range of its dtype"),
    # Implied by the range of the dtype, which is a condition before.
    ("qfuse.linear_w8a16", "the zero points of the codes fit 8 bits"),
    ("qfuse.convolution_w8a16", "the zero points of the codes fit them"),
}
"""Conditions of several kernels that hold for one of them, whenever those before hold."""


@cache
def problem_of(name: str, case: str) -> Any:
    """Return the last problem that the kernel covers: a linear comes before what is behind it."""
    return [p for p in problems_of(PROGRAMS[name][case]()) if p.span in KERNELS[name].covers][-1]


def declared() -> list[Any]:
    """Every condition of every kernel, with its place in the list."""
    return [
        pytest.param(name, case, index, condition.name, id=f"{name}-{case}-{condition.name}")
        for name, cases in PROGRAMS.items()
        for case in cases
        for index, condition in enumerate(KERNELS[name].conditions(problem_of(name, case)))
        if (name, condition.name) not in ALWAYS
    ]


def test_every_kernel_declares_its_conditions() -> None:
    assert KERNELS.keys() == PROGRAMS.keys()
    assert all(isinstance(kernel, Conditional) for kernel in KERNELS.values())


@pytest.mark.parametrize(("name", "case"), [(n, c) for n, cases in PROGRAMS.items() for c in cases])
def test_a_problem_of_which_all_conditions_hold(name: str, case: str) -> None:
    assert isinstance(KERNELS[name].accepts(problem_of(name, case)), Claim)


@pytest.mark.parametrize(("name", "case", "index", "condition"), declared())
def test_a_condition_that_does_not_hold(name: str, case: str, index: int, condition: str) -> None:
    kernel, problem = KERNELS[name], broken(problem_of(name, case), condition)

    answer = kernel.accepts(problem)

    assert isinstance(answer, Unmet), answer
    assert (answer.failed, answer.held) == (condition, index), answer.reason
    assert answer.conditions == len(kernel.conditions(problem))
