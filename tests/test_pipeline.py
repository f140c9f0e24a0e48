"""The pipeline keeps a model right when a rewrite or a kernel is not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from qfuse import kernels, pipeline
from qfuse.capture import capture
from qfuse.cost import CostModel, CostProfile
from qfuse.cost.work import Work
from qfuse.ir.calling import Caller
from qfuse.ir.events import Checked, RolledBack
from qfuse.lower.kernel import Claim
from qfuse.model_check import ModelCheck, bisect
from qfuse.options import Check
from qfuse.pipeline import Planner, run_flat
from qfuse.rewrite.clone import clone
from qfuse.targets import Target

if TYPE_CHECKING:
    from qfuse.ir.program import CapturedGraph
    from qfuse.lower.kernel import LinearProblem, Refusal
    from qfuse.rewrite.rewriter import Rewriter

aten = torch.ops.aten
NONE = kernels.KernelLibrary(available=False, reason="not in this test")


class WeightOnly(nn.Module):
    """Two weight-only linears as people write them by hand."""

    a_weight: torch.Tensor
    a_scale: torch.Tensor
    b_weight: torch.Tensor
    b_scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, n, k in (("a", 24, 16), ("b", 8, 24)):
            weight = torch.randint(-127, 128, (n, k)).to(torch.int8)
            self.register_buffer(f"{name}_weight", weight)
            self.register_buffer(f"{name}_scale", torch.rand(n) * 0.01 + 1e-3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(nn.functional.linear(x, self.a_weight.float()) * self.a_scale)
        return nn.functional.linear(x, self.b_weight.float()) * self.b_scale


@dataclass
class Off:
    """A kernel that is off by a factor on one of the linears."""

    n: int
    name: str = "off"

    def supported(self, target: Target) -> Refusal | None:
        """It runs everywhere."""
        del target
        return None

    def accepts(self, problem: LinearProblem) -> Claim | Refusal:
        """It takes the bare linear."""
        del problem
        return Claim(0, False, Work())

    def emit(self, problem: LinearProblem, claim: Claim, rw: Rewriter) -> torch.fx.Node:
        """Multiply with the stored weight, and scale wrongly where it was told to."""
        del claim
        fused = problem.fused
        assert fused.weight_params is not None
        weight = rw.call(aten._to_copy.default, fused.weight, dtype=torch.float32)
        real = rw.call(aten.mul.Tensor, weight, fused.weight_params.scale)
        y = rw.call(aten.linear.default, fused.x, real, fused.bias)
        return rw.call(aten.mul.Tensor, y, 1.01) if problem.n == self.n else y


def planned(
    monkeypatch: pytest.MonkeyPatch, check: Check, n: int
) -> tuple[CapturedGraph, list[torch.Tensor], pipeline.Plan]:
    """Plan the model with a kernel that is wrong for linears of ``n`` outputs."""

    def rows(library: kernels.KernelLibrary) -> tuple[Off, ...]:
        del library
        return (Off(n),)

    monkeypatch.setattr(pipeline, "kernel_rows", rows)
    x = torch.randn(5, 16)
    captured = capture(WeightOnly().eval(), (x,))
    caller = Caller(captured.signature)
    inputs = caller.check(caller.bind((x,), {}))
    cost = CostModel(CostProfile.pinned())
    planner = Planner(Target.for_testing(), cost, NONE, check)
    return captured, inputs, planner.plan(captured, inputs)


@pytest.mark.parametrize("check", [Check.SITE, Check.PIPELINE])
@pytest.mark.parametrize("n", [24, 8])
def test_a_wrong_kernel_is_found_and_rolled_back(
    monkeypatch: pytest.MonkeyPatch, check: Check, n: int
) -> None:
    captured, inputs, plan = planned(monkeypatch, check, n)

    (undone,) = plan.lowered.log.of(RolledBack)
    assert undone.rule == "lower-linear"
    (new,), (old,) = (
        run_flat(plan.lowered, inputs),
        torch.fx.Interpreter(captured.module).run(*inputs),
    )
    torch.testing.assert_close(new, old)
    model = [c for c in plan.lowered.log.of(Checked) if c.what == "model"]
    assert [c.passed for c in model] == [True]


def test_a_right_kernel_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, plan = planned(monkeypatch, Check.PIPELINE, n=-1)

    assert not plan.lowered.log.of(RolledBack)


def test_check_off_checks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, plan = planned(monkeypatch, Check.OFF, n=24)

    assert not plan.lowered.log.of(Checked)
    assert plan.reference is None


def test_the_captured_graph_is_not_consumed(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, inputs, _ = planned(monkeypatch, Check.PIPELINE, n=8)
    again = clone(captured)

    (one,), (two,) = (torch.fx.Interpreter(p.module).run(*inputs) for p in (captured, again))
    assert torch.equal(one, two)


@pytest.mark.parametrize("culprit", [1, 2, 7, 8])
def test_bisect_finds_the_first_wrong_count(culprit: int) -> None:
    asked: list[int] = []

    def holds(count: int) -> bool:
        asked.append(count)
        return count < culprit

    assert bisect(8, holds) == culprit
    assert len(asked) <= 3


def test_noise_is_measured_and_a_wrong_output_is_beyond_it() -> None:
    x = torch.randn(5, 16)
    captured = capture(WeightOnly().eval(), (x,))
    check = ModelCheck.measure(captured, [x])
    (right,) = check.outputs

    assert check.judge([right]).wrong is None
    assert check.judge([right * (1 + 1e-6)]).wrong is None
    assert check.judge([right * 1.001]).wrong is not None
    assert check.judge([right + 0.1]).wrong is not None
