"""The pipeline keeps a model right when a rewrite or a kernel is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from qfuse import kernels, pipeline
from qfuse.backends.eager import run_eagerly
from qfuse.capture import capture
from qfuse.cost import CostModel, CostProfile
from qfuse.cost.work import Work
from qfuse.ir.errors import CheckError
from qfuse.ir.events import Checked, Lowered, RolledBack
from qfuse.ir.graph.stage_graph import CapturedGraph, LoweredGraph
from qfuse.ir.refusal import Refusal
from qfuse.ir.signature.caller import Caller
from qfuse.ir.signature.run import run_flat
from qfuse.lower import lower
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.linear import LinearProblem
from qfuse.lower.problems.span import LINEAR, Span
from qfuse.model_check import ModelCheck, bisect_count
from qfuse.options import Check
from qfuse.pipeline import Pipeline
from qfuse.rewrite.clone import clone
from qfuse.rewrite.rewriter import Rewriter
from qfuse.targets import Target

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

    covers: ClassVar[tuple[Span, ...]] = (LINEAR,)

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

    def emit(self, problem: LinearProblem, claim: Claim, rw: Rewriter) -> dict[int, torch.fx.Node]:
        """Multiply with the stored weight, and scale wrongly where it was told to."""
        del claim
        fused = problem.fused
        assert fused.weight_params is not None
        weight = rw.call(aten._to_copy.default, fused.weight, dtype=torch.float32)
        real = rw.call(aten.mul.Tensor, weight, fused.weight_params.scale)
        y = rw.call(aten.linear.default, fused.x, real, fused.bias)
        return {0: rw.call(aten.mul.Tensor, y, 1.01) if problem.n == self.n else y}


@dataclass
class Raises(Off):
    """A kernel whose call for one of the linears has the right type, but raises."""

    def emit(self, problem: LinearProblem, claim: Claim, rw: Rewriter) -> dict[int, torch.fx.Node]:
        """Select rows that do not exist."""
        (y,) = super().emit(problem, claim, rw).values()
        rows = rw.constant(torch.full((5,), 99), "rows")
        return {0: rw.call(aten.index_select.default, y, 0, rows) if problem.n == self.n else y}


def planned(
    monkeypatch: pytest.MonkeyPatch,
    check: Check,
    n: int,
    model: nn.Module | None = None,
    kernel: type[Off] = Off,
) -> tuple[CapturedGraph, list[torch.Tensor], pipeline.Plan]:
    """Plan the model with a kernel that is wrong for linears of ``n`` outputs."""

    def rows(library: kernels.KernelLibrary) -> tuple[Off, ...]:
        del library
        return (kernel(n),)

    monkeypatch.setattr(pipeline, "all_kernels", rows)
    x = torch.randn(5, 16)
    captured = capture((model or WeightOnly()).eval(), (x,))
    caller = Caller(captured.signature)
    inputs = caller.check(caller.bind((x,), {}))
    cost = CostModel(CostProfile.pinned())
    planner = Pipeline(Target.for_testing(), cost, NONE, check)
    return captured, inputs, planner.plan(captured, inputs)


@pytest.mark.parametrize(
    ("check", "reason"),
    [(Check.SITE, "the new ops do not run"), (Check.PIPELINE, "the rewritten graph does not run")],
)
def test_a_rewrite_that_cannot_run_is_found_and_rolled_back(
    monkeypatch: pytest.MonkeyPatch, check: Check, reason: str
) -> None:
    captured, inputs, plan = planned(monkeypatch, check, n=24, kernel=Raises)

    (undone,) = plan.lowered.log.of(RolledBack)
    assert undone.reason.startswith(reason)
    torch.testing.assert_close(
        run_flat(plan.lowered.module, inputs), run_flat(captured.module, inputs)
    )


@pytest.mark.parametrize("check", [Check.SITE, Check.PIPELINE])
@pytest.mark.parametrize("n", [24, 8])
def test_a_wrong_kernel_is_found_and_rolled_back(
    monkeypatch: pytest.MonkeyPatch, check: Check, n: int
) -> None:
    captured, inputs, plan = planned(monkeypatch, check, n)

    (undone,) = plan.lowered.log.of(RolledBack)
    assert undone.rule == "lower-linear"
    (new,), (old,) = (
        run_flat(plan.lowered.module, inputs),
        torch.fx.Interpreter(captured.module).run(*inputs),
    )
    torch.testing.assert_close(new, old)
    model = [c for c in plan.lowered.log.of(Checked) if c.what == "model"]
    assert [c.passed for c in model] == [True]


class Deep(nn.Module):
    """Ten weight-only linears of one shape, so that one wrong kernel is wrong ten times."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(10):
            self.register_buffer(f"w{i}", torch.randint(-127, 128, (16, 16)).to(torch.int8))
            self.register_buffer(f"s{i}", torch.rand(16) * 0.01 + 1e-3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(10):
            w, s = self.get_buffer(f"w{i}"), self.get_buffer(f"s{i}")
            x = torch.tanh(nn.functional.linear(x, w.float()) * s)
        return x


def test_a_kernel_that_is_wrong_everywhere_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, plan = planned(monkeypatch, Check.PIPELINE, n=16, model=Deep())

    undone = plan.lowered.log.of(RolledBack)
    assert [event.rule for event in undone] == ["lower-linear", "lower-linear"]
    assert [c.passed for c in plan.lowered.log.of(Checked)] == [True]
    assert {e.kernel for e in plan.lowered.log.of(Lowered)} == {"expand"}


def test_what_no_gate_keeps_out_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **rows: Any) -> LoweredGraph:
        done = lower(*args, **rows)
        output = done.graph.output_node()
        (y,) = output.all_input_nodes
        with done.graph.inserting_before(output):
            output.args = ((done.graph.call_function(aten.mul.Tensor, (y, 2)),),)
        return done

    monkeypatch.setattr(pipeline, "lower", wrong)
    with pytest.raises(CheckError, match="with every rewrite undone"):
        planned(monkeypatch, Check.PIPELINE, n=-1)


def test_a_model_that_does_not_repeat_its_values_is_told_so() -> None:
    """What torch's own ops give may be left to chance, as where they read uninitialized memory."""
    calls = iter(range(100))

    class Varies(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    x = torch.ones(3)
    captured = capture(Varies().eval(), (x,))
    (multiply,) = captured.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    right = ModelCheck.measure(captured, [x])
    multiply.target = lambda x, two: aten.mul.Tensor(x, two) + next(calls)
    captured.module.recompile()

    error = right.unkept("the values differ", captured, [x + 1])

    assert "itself returns other values when it is called again" in str(error)
    assert "qfuse doctor" in str(error)


def test_code_that_writes_wrong_state_is_not_used() -> None:
    class Counts(nn.Module):
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(x)
            return x * 2

    x = torch.ones(3)
    captured = capture(Counts().eval(), (x,))
    plan = Pipeline(
        Target.for_testing(), CostModel(CostProfile.pinned()), NONE, Check.PIPELINE
    ).plan(captured, [x])
    right = run_eagerly(plan.lowered)

    class Forgets:
        """Runs on a copy of the state."""

        backend = "forgetful"

        def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            outputs: list[torch.Tensor] = right.fork().run(inputs)
            return outputs

        def written(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return right.written(inputs)

        def fork(self) -> Forgets:
            return self

    assert plan.confirm(right, [x]) is right
    assert plan.confirm(Forgets(), [x]).backend == "eager"
    assert torch.equal(plan.lowered.module.get_buffer("seen"), torch.zeros(3))


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


@pytest.mark.parametrize("first_wrong", [1, 2, 7, 8])
def test_bisect_finds_the_first_wrong_count(first_wrong: int) -> None:
    asked: list[int] = []

    def holds(count: int) -> bool:
        asked.append(count)
        return count < first_wrong

    assert bisect_count(8, holds) == first_wrong
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
