"""Lists of conditions: how many hold, and which is the first that does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch.fx import Node

from qfuse.cost.work import Work
from qfuse.ir.events import EXPAND, KernelProgress, Lowered, Place
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.refusal import Refusal
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.conditions import Condition, Conditions, Unmet, hold, on, refusal_in
from qfuse.lower.problems.linear import LinearProblem
from qfuse.lower.problems.span import LINEAR, Span
from qfuse.rewrite.prelude import Rewriter
from qfuse.targets import Target
from qfuse.testing import GraphBuilder, QuantizedLinear, lowered_with


def is_more(least: int) -> Condition[int]:
    """The condition of a number."""
    return Condition(
        f"more than {least}",
        lambda number: None if number > least else Refusal(f"{number} is not more than {least}"),
    )


MORE = (is_more(1), is_more(2), is_more(3))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_conditions_are_counted_up_to_the_first_that_does_not_hold(number: int) -> None:
    unmet = hold(MORE, number)

    assert isinstance(unmet, Unmet)
    assert (unmet.failed, unmet.held, unmet.conditions) == (f"more than {number}", number - 1, 3)
    assert unmet.reason == f"{number} is not more than {number}"


def test_all_conditions_hold() -> None:
    assert hold(MORE, 4) is None
    assert hold((), 0) is None


def test_conditions_behind_one_that_does_not_hold_are_not_tested() -> None:
    def never(number: int) -> Refusal | None:
        raise AssertionError(number)

    assert hold((is_more(1), Condition("never", never)), 0) is not None


def test_conditions_of_a_part() -> None:
    unmet = hold(on(len, MORE), "ab")

    assert unmet is not None
    assert (unmet.failed, unmet.held) == ("more than 2", 1)


def test_a_refusal_in_what_was_computed() -> None:
    refusal = Refusal("no")

    assert refusal_in(refusal) is refusal
    assert refusal_in(3) is None


@dataclass
class Plain:
    """A kernel that declares nothing, as those of packages made for earlier versions."""

    covers: ClassVar[tuple[Span, ...]] = (LINEAR,)

    name: str = "plain"
    missing: bool = False

    def supported(self, target: Target) -> Refusal | None:
        """Whether it is there."""
        del target
        return Refusal("it is not there") if self.missing else None

    def accepts(self, problem: LinearProblem) -> Claim | Refusal:
        """It takes nothing."""
        del problem
        return Refusal("it takes nothing")

    def emit(self, problem: LinearProblem, claim: Claim, rw: Rewriter) -> Mapping[int, Node]:
        """It is never asked to."""
        raise AssertionError(problem, claim, rw)


def _check_bias(problem: LinearProblem) -> Refusal | None:
    return Refusal("it needs a bias") if problem.fused.bias is None else None


def _check_rows(problem: LinearProblem) -> Refusal | None:
    return Refusal("it takes seven rows") if problem.rows.low != 7 else None


@dataclass
class Seven(Plain):
    """A kernel of seven rows with a bias, which declares that."""

    name: str = "seven"

    def conditions(self, problem: LinearProblem) -> Conditions:
        """A bias and the rows."""
        del problem
        bias: Condition[LinearProblem] = Condition("it has a bias", _check_bias)
        return (bias, Condition("it has seven rows", _check_rows))

    def accepts(self, problem: LinearProblem) -> Claim | Refusal:
        """Take seven rows."""
        return hold(self.conditions(problem), problem) or Claim(0, False, Work())


def program(*, bias: bool = True) -> NormalGraph:
    """A weight-only linear of five rows."""
    b = GraphBuilder()
    return b.done(QuantizedLinear(b, 12, 16, bias=bias).linear(b.arg("x", torch.float32, 5, 16)))


def progress_of(*kernels: Plain, bias: bool = True) -> dict[str, KernelProgress]:
    """Lower a linear; return how close every kernel came."""
    (event,) = lowered_with(program(bias=bias), *kernels).log.of(Lowered)
    assert [one.kernel for one in event.progress] == [name for name, _ in event.losers]
    return {one.kernel: one for one in event.progress}


def test_that_the_target_has_a_kernel_is_its_first_condition() -> None:
    found = progress_of(Seven(), Seven("absent", missing=True))

    assert found["seven"] == KernelProgress("seven", 2, 3, "it has seven rows")
    assert found["absent"] == KernelProgress("absent", 0, 3, "the target has the kernel")
    assert progress_of(Seven(), bias=False)["seven"].held == 1


def test_a_kernel_without_conditions_has_one() -> None:
    found = progress_of(Plain(), Plain("absent", missing=True))

    assert found["plain"] == KernelProgress("plain", 0, 1)
    assert found["absent"] == KernelProgress("absent", 0, 1, "the target has the kernel")


LOSERS = (("far", "no"), ("slow", "predicted 2 us"), ("near", "not quite"), ("loops", "slower"))
PROGRESS = (
    KernelProgress("far", 1, 9, "one"),
    KernelProgress("slow", 4, 4),
    KernelProgress("near", 8, 9, "nine"),
    KernelProgress("loops"),
)


def lost(progress: tuple[KernelProgress, ...]) -> Lowered:
    """An op without a kernel."""
    return Lowered("lower", Place("n", "op"), EXPAND, losers=LOSERS, progress=progress)


def test_the_kernel_that_came_closest_comes_first() -> None:
    event = lost(PROGRESS)

    assert [one.kernel for one, _ in event.nearest] == ["slow", "near", "far", "loops"]
    assert [one.label for one, _ in event.nearest] == [
        "slow",
        "near (8 of 9 conditions hold)",
        "far (1 of 9 conditions hold)",
        "loops",
    ]
    assert event.closest == "slow: predicted 2 us"


@pytest.mark.parametrize("progress", [(), PROGRESS[:2]])
def test_an_event_of_an_earlier_version_keeps_the_order(
    progress: tuple[KernelProgress, ...],
) -> None:
    event = lost(progress)

    assert [(one.label, reason) for one, reason in event.nearest] == list(LOSERS)
    assert Lowered("lower", Place("n", "op"), "kernel").closest == ""
