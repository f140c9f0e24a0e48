"""A linear and the op of rows behind it as one kernel: what is taken, and what not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.linear_rowwise import CHOOSE, CODES, TRIP, LinearRowwiseCase, lowered
from tests.support.cases.lowering import NO_KERNELS

from qfuse import kernels
from qfuse.cost.work import ComputeKind, Work
from qfuse.ir.events import Lowered
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import LoweredGraph, OptimizedGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops.activation import as_activation
from qfuse.ir.ops.epilogue import Round
from qfuse.ir.quant.choose import Formula
from qfuse.ir.refusal import Refusal
from qfuse.lower.kernels.linear_w8a8 import LinearW8A8
from qfuse.lower.operands.int8_linear import linear_rowwise_work
from qfuse.lower.operands.packing import Packer
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.linear import LinearProblem
from qfuse.lower.problems.linear_rowwise import LinearRowwiseProblem, linear_rowwise_problem
from qfuse.rewrite.compare import compare_rounded
from qfuse.rewrite.tolerance import SITE
from qfuse.testing.run import random_inputs, run

pytestmark = pytest.mark.numeric

BF16 = torch.bfloat16
WHOLE = replace(CODES, block=(None,) * 3)
ROUNDED = f"act(silu)|round(0,1,{TRIP})|mul(2,0,1,{TRIP})"

NARROW_TRIP = replace(TRIP, float_dtype=BF16)


pytestmark = pytest.mark.own_kernels


TAKEN = {
    "swiglu, dynamic": LinearRowwiseCase(),
    "geglu, up first, kept": LinearRowwiseCase(epilogue="glu(gelu_tanh,up-first)", keep="float"),
    "odd halves": LinearRowwiseCase(n=142),
    "whole blocks": LinearRowwiseCase(n=256),
    "bfloat16": LinearRowwiseCase(float_dtype=BF16, spec=replace(CODES, float_dtype=BF16), keep="float"),
    "asymmetric": LinearRowwiseCase(
        spec=replace(CODES, dtype=torch.uint8, quant_min=0, quant_max=255),
        choose=replace(
            CHOOSE, formula=Formula.AO_ASYMMETRIC, dtype=torch.uint8, quant_min=0, quant_max=255
        ),
    ),
    "given parameters": LinearRowwiseCase(spec=WHOLE, choose=None),
    "given parameters, kept": LinearRowwiseCase(spec=WHOLE, choose=None, keep="float"),
    "float": LinearRowwiseCase(spec=None),
    "float in bfloat16": LinearRowwiseCase(spec=None, float_dtype=BF16),
    "steps behind": LinearRowwiseCase(epilogue="glu(relu,gate-first)|add(0,0.5)", extras=((16, 70),)),
    "steps in front": LinearRowwiseCase(inner="add(0,1.0)|act(relu)"),
    "steps and operands of both": LinearRowwiseCase(
        inner="mul(0)", epilogue="glu(silu,up-first)|mul(0)|add(0,-1.0)", extras=((16, 70),)
    ),
    "no halves": LinearRowwiseCase(epilogue="act(gelu)"),
    "no steps": LinearRowwiseCase(epilogue=""),
    "no halves, operand": LinearRowwiseCase(epilogue="act(silu)|mul(0)", extras=((16, 140),)),
    "split": LinearRowwiseCase(reads="split", epilogue="act(silu)|mul(0)", extras=("up",)),
    "slices": LinearRowwiseCase(reads="slices", epilogue="act(silu)|mul(0)", extras=("up",)),
    "up first": LinearRowwiseCase(reads="swapped", epilogue="act(silu)|mul(0)", extras=("up",)),
    "to the end": LinearRowwiseCase(reads="to the end", epilogue="act(silu)|mul(0)", extras=("up",)),
    "cast on both sides": LinearRowwiseCase(
        reads="split", epilogue="cast(bfloat16)|act(silu)|mul(0)", extras=("cast up",),
        spec=replace(CODES, float_dtype=BF16),
    ),
    "rounded on both sides": LinearRowwiseCase(
        reads="split", epilogue=ROUNDED, extras=(0.011, 25, "up"), spec=WHOLE, choose=None
    ),
    "rounded on both sides, bfloat16": LinearRowwiseCase(
        float_dtype=BF16, reads="split",
        epilogue=f"act(silu)|round(0,1,{NARROW_TRIP})|mul(2,0,1,{NARROW_TRIP})",
        extras=(0.011, 25, "up"), spec=None,
    ),
    "rounded behind": LinearRowwiseCase(
        epilogue=f"glu(silu,gate-first)|round(0,-,{TRIP})", extras=(0.02,), spec=None
    ),
    "any number of rows": LinearRowwiseCase(rows=("b", 16)),
}  # fmt: skip

REFUSED = {
    "the linear has other users": LinearRowwiseCase(other="linear"),
    "two kernels": LinearRowwiseCase(epilogue="", other="linear", rows=(64, 64)),
    "or the op uses it more than once": LinearRowwiseCase(
        reads="split", epilogue="act(silu)|mul(0)", extras=("up",), other="half"
    ),
    "the value between the two is quantized": LinearRowwiseCase(
        linear={"out_spec": str(replace(WHOLE, float_dtype=torch.float32))}, epilogue="act(relu)"
    ),
    "there are two GLUs": LinearRowwiseCase(
        n=144, epilogue="glu(silu,gate-first)|glu(silu,gate-first)"
    ),
    "too many ops": LinearRowwiseCase(epilogue="|".join(["act(relu)"] * 9)),
    "broadcast to the result": LinearRowwiseCase(
        epilogue="glu(silu,gate-first)|mul(0)", extras=((1, 1, 70),)
    ),
    "or the result to it": LinearRowwiseCase(
        epilogue="act(silu)|mul(0)", extras=((8, 16, 140),), rows=(1, 16)
    ),
    "an operand is broadcast": LinearRowwiseCase(
        reads="split", epilogue="act(silu)|mul(0)|add(1,1.0)", extras=("up", (8, 16, 70)),
        rows=(1, 16),
    ),
    "intermediate rounding of bfloat16 as if it were float32": LinearRowwiseCase(
        float_dtype=BF16, reads="split", epilogue=f"act(silu)|round(0,1,{TRIP})|mul(2)",
        extras=(0.011, 25, "up"), spec=None,
    ),
    "rounding of bfloat16 as if": LinearRowwiseCase(
        float_dtype=BF16, reads="split", epilogue=f"act(silu)|mul(2,0,1,{TRIP})",
        extras=(0.011, 25, "up"), spec=None,
    ),
    "it quantizes bfloat16 as if it were float32": LinearRowwiseCase(float_dtype=BF16),
    "intermediate cast to float64": LinearRowwiseCase(
        epilogue="cast(float64)", spec=replace(CODES, float_dtype=torch.float64)
    ),
    "a factor has an intermediate rounding": LinearRowwiseCase(
        epilogue=f"act(silu)|mul(2,0,1,{TRIP})", extras=(0.01, 3, (16, 140)),
    ),
    "an unsupported quantization": LinearRowwiseCase(
        epilogue=f"act(silu)|round(0,-,{replace(TRIP, dtype=torch.int16)})", extras=(0.01,)
    ),
    "its scale is computed for blocks": LinearRowwiseCase(
        spec=replace(CODES, block=(1, None, None)), choose=replace(CHOOSE, block=(1, None, None))
    ),
    "its result is stored as int16": LinearRowwiseCase(
        spec=replace(CODES, dtype=torch.int16), choose=replace(CHOOSE, dtype=torch.int16)
    ),
}  # fmt: skip

# The op reads something else than a linear, or than its halves.
APART = {
    "off by one": LinearRowwiseCase(
        reads="off by one", epilogue="act(silu)|mul(0)", extras=("up",)
    ),
    "one half twice": LinearRowwiseCase(reads="twice", epilogue="act(silu)|mul(0)", extras=("up",)),
    "one half, added": LinearRowwiseCase(
        reads="split", epilogue="act(silu)|add(0,1.0)", extras=("up",)
    ),
}


def events_of(low: LoweredGraph) -> list[Lowered]:
    """What became of the two."""
    return list(low.log.of(Lowered))


def last_step(program: OptimizedGraph) -> torch.Tensor | None:
    """What one step of the rounding is worth that the float result ends with, if one does."""
    (fused,) = filter(None, map(as_activation, program.graph.nodes))
    last = fused.epilogue.ops[-1] if fused.epilogue.ops else None
    if not isinstance(last, Round) or fused.output.spec is not None:
        return None
    return program.module.get_buffer(str(fused.extras[last.scale].target))


def assert_same_values(program: OptimizedGraph, low: LoweredGraph, *, narrow: bool = False) -> None:
    """Within a step of the codes, or of the floats where they were codes last, and rounding.

    A linear in bfloat16 rounds its operands and kernels do not, so there the two kernels are what
    the one is compared with.
    """
    inputs = random_inputs(program, b=3)
    before = [t.clone() for t in inputs]
    new = run(low, inputs)
    old = run(lowered(program, banned="lower/lower-linear-rowwise") if narrow else program, inputs)
    step = last_step(program)
    for mine, want in zip(new, old, strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (want.dtype, want.shape, want.stride())
        if mine.dtype in {torch.int8, torch.uint8, torch.int16}:
            assert (mine.int() - want.int()).abs().max() <= 1
            assert (mine != want).float().mean() < 0.02
        elif step is not None:
            assert compare_rounded(mine, want, None, step, SITE).wrong is None
        elif mine.is_floating_point():
            scale = float(want.abs().max()) + 1e-6
            eps = torch.finfo(mine.dtype).eps
            torch.testing.assert_close(mine, want, rtol=8 * eps, atol=8 * eps * scale)
    assert all(map(torch.equal, inputs, before))
    assert all(map(torch.equal, run(low, inputs), new))


@pytest.mark.parametrize("name", TAKEN)
def test_what_a_kernel_takes_it_computes(name: str) -> None:
    program = TAKEN[name].program()
    low = lowered(program)
    (event,) = events_of(low)
    assert (event.kernel, event.place.op) == ("qfuse.linear_w8a8", "qfuse.linear")
    assert_same_values(program, low, narrow=TAKEN[name].float_dtype is BF16)


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_does_not_take_runs_apart_with_a_reason(reason: str) -> None:
    program = REFUSED[reason].program()
    low = lowered(program)
    rows = [e for e in events_of(low) if e.place.op == "qfuse.activation"]
    assert len(events_of(low)) == 2
    assert any(reason in why for e in rows for _, why in e.losers), rows
    assert_same_values(program, low, narrow=REFUSED[reason].float_dtype is BF16)


@pytest.mark.parametrize("name", APART)
def test_what_does_not_fuse_runs_apart(name: str) -> None:
    program = APART[name].program()
    low = lowered(program)
    assert {e.place.op for e in events_of(low)} == {"qfuse.linear", "qfuse.activation"}
    assert_same_values(program, low)


def test_golden_one_call_is_left_of_both() -> None:
    low = lowered(LinearRowwiseCase(spec=WHOLE, choose=None).program())
    calls = [n for n in low.graph.nodes if n.op == "call_function"]
    assert [str(n.target) for n in calls] == ["qfuse.linear_w8a8_quantized.default"]
    assert_expected_inline(
        to_text(low.graph),
        """\
%q: int8[8, 16, 36]
%q_scale: float32[8, 16, 1]
const %bias: float32[140]
const %scale: float32[1, 1, 1]
const %zero: int32[1, 1, 1]
const %w_packed: int8[4, 9, 64, 4]
const %w_sums: int32[140]
const %w_scale_vector: float32[140]
%0 = qfuse.linear_w8a8_quantized(%q, %q_scale, None, %w_packed, %w_sums, %w_scale_vector, None, %bias, None, 'glu(silu,gate-first)', float32, %scale, %zero, -128, 127, True, False, int8): int8[8, 16, 70]
return (%0)""",
    )
    low = lowered(LinearRowwiseCase(keep="float").program())
    calls = [n for n in low.graph.nodes if is_call(n, torch.ops.qfuse.linear_w8a8_rows.default)]
    assert len(calls) == 1
    (event,) = events_of(low)
    assert event.what.endswith("| glu(silu,gate-first) -> int8 per-token dynamic")


def test_without_kernels_both_are_expanded() -> None:
    program = LinearRowwiseCase().program()
    low = lowered(program, NO_KERNELS)
    (rows,) = [e for e in events_of(low) if e.place.op == "qfuse.activation"]
    assert ("qfuse.linear_w8a8 with the linear", NO_KERNELS.reason) in rows.losers


class Priced(LinearW8A8):
    """A kernel that takes a linear with the op behind it at another price."""

    flops = 1e12

    def accepts(self, problem: LinearProblem | LinearRowwiseProblem) -> Claim | Refusal:
        answer = super().accepts(problem)
        if isinstance(problem, LinearProblem) or isinstance(answer, Refusal):
            return answer
        return replace(answer, work=Work(flops=self.flops, kind=ComputeKind.INT8))


class Cheap(Priced):
    """One that costs nothing."""

    flops = 0.0


@pytest.mark.parametrize("float_dtype", [torch.float32, BF16])
def test_what_others_read_of_the_linear_is_kept(float_dtype: torch.dtype) -> None:
    """They read it before the op behind it stands in the graph."""
    case = LinearRowwiseCase(
        epilogue="",
        other="linear",
        float_dtype=float_dtype,
        spec=replace(CODES, float_dtype=float_dtype),
    )
    program = case.program()
    low = lowered(program, registry=[Cheap(kernels.load(), Packer())])
    (event,) = events_of(low)
    assert event.place.op == "qfuse.linear"
    assert_same_values(program, low, narrow=float_dtype is BF16)


@pytest.mark.parametrize(
    ("case", "writes"),
    [
        (LinearRowwiseCase(), (4.0, 1.0)),
        (LinearRowwiseCase(keep="float"), (4.0, 1.0 + 4.0)),
        (
            LinearRowwiseCase(
                float_dtype=BF16, spec=replace(CODES, float_dtype=BF16), keep="float"
            ),
            (4.0, 1.0 + 2.0),
        ),
        (LinearRowwiseCase(spec=WHOLE, choose=None, keep="float"), (4.0, 1.0 + 4.0)),
        (LinearRowwiseCase(spec=WHOLE, choose=None), (1.0,)),
        (LinearRowwiseCase(spec=None), (4.0,)),
        (LinearRowwiseCase(spec=None, float_dtype=BF16), (2.0,)),
    ],
)
def test_what_is_written_costs_its_bytes(
    case: LinearRowwiseCase, writes: tuple[float, ...]
) -> None:
    """Floats in strips and codes of a result of 8 * 16 * 70 numbers, and what is kept of it."""
    program = case.program()
    node = next(n for n in program.graph.nodes if as_activation(n) is not None)
    both = linear_rowwise_problem(node, program.signature.symbols)
    assert isinstance(both, LinearRowwiseProblem)
    plan = [work.hint for work in linear_rowwise_work(both, both.problem.k, 8)]
    assert [sum(work.writes) / (8 * 16 * 70) for work in plan] == pytest.approx(list(writes))


def test_two_kernels_are_taken_where_they_are_predicted_faster() -> None:
    program = LinearRowwiseCase().program()
    low = lowered(program, registry=[Priced(kernels.load(), Packer())])
    (rows,) = [e for e in events_of(low) if e.place.op == "qfuse.activation"]
    assert any("two kernels" in why for _, why in rows.losers)
    assert_same_values(program, low)


def test_one_that_is_not_permitted_runs_apart() -> None:
    program = LinearRowwiseCase().program()
    low = lowered(program, banned="lower/lower-linear-rowwise")
    (rows,) = [e for e in events_of(low) if e.place.op == "qfuse.activation"]
    assert ("qfuse.linear_w8a8 with the linear", "it is not permitted") in rows.losers
    assert_same_values(program, low)
