"""The product of a linear's halves as one op, where it stays float."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.epilogue import Case, fuse, only_miss
from tests.support.values import bits_same
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.activation import as_activation
from qfuse.ir.ops.linear import as_fused_linear
from qfuse.ir.quant.spec import QuantSpec
from qfuse.optimize import optimize
from qfuse.optimize.fuse.gate import FuseGate
from qfuse.rewrite.clone import clone
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_tensor
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten
F32 = torch.float32
SCALE = torch.full((1, 1), 0.5)


def halves(case: Case, *, at: int = 2, cut: str = "split") -> tuple[Node, Node]:
    """Both halves of the linear's four features, cut by a split or by slices."""
    if cut == "split":
        parts = case.b.call(aten.split_with_sizes.default, case.y, [at, 4 - at], -1)
        return case.b.item(parts, 0), case.b.item(parts, 1)
    axis = len(case.y.meta["val"].shape) - 1
    low = case.b.call(aten.slice.Tensor, case.y, axis, 0, at)
    return low, case.b.call(aten.slice.Tensor, case.y, axis, at, 4)


def product(case: Case, gate: Node, up: Node, *, gate_left: bool = True) -> Node:
    """``silu(gate) * up``, in one order or the other."""
    act = case.b.call(aten.silu.default, gate)
    return case.b.call(aten.mul.Tensor, *((act, up) if gate_left else (up, act)))


def epilogues(program: NormalGraph) -> list[str]:
    """The steps of what was made."""
    found = map(as_activation, program.graph.nodes)
    return [str(op.epilogue) for op in found if op is not None]


@pytest.mark.numeric
def test_golden_halves_become_one_op() -> None:
    case = Case()
    program = case.done(product(case, *halves(case)))

    assert fuse(program, FuseGate).fired == {"fuse-gate": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 8]
%r: float32[s0, 4]
const %x_scale: float32[1, 1]
const %x_zero: int32[1, 1]
%0 = qfuse.quantize(%x, %x_scale, %x_zero, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): int8[s0, 8]
const %w: int8[4, 8]
const %w_scale: float32[4, 1]
const %w_bias: float32[4]
%1 = qfuse.linear(%0, %x_scale, %x_zero, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int', %w, %w_scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int', %w_bias, None, None, '', '', ()): float32[s0, 4]
%2 = qfuse.activation(%1, None, None, '', 'glu(silu,gate-first)', (), None, None, '', '', ''): (float32[s0, 2])
%3 = getitem(%2, 0): float32[s0, 2]
return (%3)""",
    )


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("cut", ["split", "slice"])
@pytest.mark.parametrize("gate_left", [True, False])
@pytest.mark.parametrize("up_first", [True, False])
def test_halves_become_one_step(rank: int, cut: str, *, gate_left: bool, up_first: bool) -> None:
    case = Case(rank)
    parts = halves(case, cut=cut)
    gate, up = parts[::-1] if up_first else parts
    program = case.done(product(case, gate, up, gate_left=gate_left))

    assert fuse(program, FuseGate).fired == {"fuse-gate": 1}
    assert epilogues(program) == [f"glu(silu,{'up' if up_first else 'gate'}-first)"]
    (op,) = [op for n in program.graph.nodes if (op := as_activation(n)) is not None]
    assert as_fused_linear(op.x) is not None
    assert op.output.count == 1


@pytest.mark.numeric
def test_golden_casts_on_both_sides_stay_steps() -> None:
    case = Case(3)
    gate, up = halves(case)
    narrow = [case.b.call(aten._to_copy.default, x, dtype=torch.bfloat16) for x in (gate, up)]
    program = case.done(product(case, *narrow))

    assert fuse(program, FuseGate).fired == {"fuse-gate": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[2, s0, 8]
%r: float32[2, s0, 4]
const %x_scale: float32[1, 1, 1]
const %x_zero: int32[1, 1, 1]
%0 = qfuse.quantize(%x, %x_scale, %x_zero, 'int8[-128,127] *x*x* float32 float32:reciprocal:round-zp int'): int8[2, s0, 8]
const %w: int8[4, 8]
const %w_scale: float32[4, 1]
const %w_bias: float32[4]
%1 = qfuse.linear(%0, %x_scale, %x_zero, 'int8[-128,127] *x*x* float32 float32:reciprocal:round-zp int', %w, %w_scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int', %w_bias, None, None, '', '', ()): float32[2, s0, 4]
%2 = aten.split_with_sizes(%1, (2, 2), -1): (float32[2, s0, 2], float32[2, s0, 2])
%3 = getitem(%2, 0): float32[2, s0, 2]
%4 = getitem(%2, 1): float32[2, s0, 2]
%5 = aten._to_copy(%4, dtype=bfloat16): bfloat16[2, s0, 2]
%6 = qfuse.activation(%3, None, None, '', 'cast(bfloat16)|act(silu)|mul(0)', (%5), None, None, '', '', ''): (bfloat16[2, s0, 2])
%7 = getitem(%6, 0): bfloat16[2, s0, 2]
return (%7)""",
    )


@pytest.mark.numeric
def test_it_comes_after_what_quantizes_the_product() -> None:
    """With given parameters and alone: which rule takes it depends on the reader only."""
    for stored in (True, False):
        case = Case()
        y = product(case, *halves(case))
        out = case.block.quantized(y, per_tensor(2)) if stored else y
        program = case.done(out)
        done = optimize(clone(program))
        (op,) = [op for n in done.graph.nodes if (op := as_activation(n)) is not None]
        assert (op.output.spec is not None) == stored
        inputs = random_inputs(program, m=5)
        assert bits_same(run(done, inputs), run(program, inputs))


def unequal(case: Case) -> Node:
    gate, up = halves(case, at=1)
    return product(case, gate, case.b.call(aten.slice.Tensor, up, 1, 0, 1))


def of_two(case: Case) -> Node:
    other = case.b.call(aten.slice.Tensor, case.residual, 1, 2, 4)
    return product(case, halves(case)[0], other)


def of_a_float(case: Case) -> Node:
    case.y = case.residual
    return product(case, *halves(case))


def whole(case: Case) -> Node:
    return product(case, case.y, case.residual)


def sliced(case: Case, gate: tuple[int, ...], up: tuple[int, ...]) -> Node:
    """A product of two parts of the linear's four features."""
    return product(case, *(case.b.call(aten.slice.Tensor, case.y, 1, *at) for at in (gate, up)))


def overlapping(case: Case) -> Node:
    return sliced(case, (0, 2), (1, 3))


def one_half(case: Case) -> Node:
    return sliced(case, (0, 2), (0, 2))


def in_steps(case: Case) -> Node:
    return sliced(case, (0, 4, 2), (2, 4, 1))


def quarters(case: Case) -> Node:
    return sliced(case, (0, 1), (2, 3))


def overlapping_casts(case: Case) -> Node:
    parts = (case.b.call(aten.slice.Tensor, case.y, 1, *at) for at in ((0, 2), (1, 3)))
    narrow = (case.b.call(aten._to_copy.default, x, dtype=torch.bfloat16) for x in parts)
    return product(case, *narrow)


NO_HALVES = [
    unequal, of_two, of_a_float, whole, overlapping, one_half, in_steps, quarters, overlapping_casts
]  # fmt: skip


@pytest.mark.parametrize("build", NO_HALVES)
def test_refuses_what_are_no_halves_of_one_linear(build: Any) -> None:
    case = Case()
    y = build(case)
    miss = only_miss(case.done(y, case.x), FuseGate)

    assert (miss.code, miss.at) == (MissCode.PATTERN, y)
    assert "not halves of one quantized linear" in miss.reason


def test_refuses_a_linear_that_gives_stored_numbers() -> None:
    """Whatever somebody makes of quantized values without their scale."""
    b = GraphBuilder()
    spec = QuantSpec(torch.int8, -128, 127, (None, None))
    x, w, scale = b.arg("x", F32, 3, 8), b.const("w", torch.randn(4, 8)), b.const("s", SCALE)
    args: tuple[Any, ...] = (
        x,
        None,
        None,
        "",
        w,
        None,
        None,
        "",
        None,
        scale,
        None,
        str(spec),
        "",
        [],
    )
    linear = b.call(ops.linear, *args)
    parts = [b.call(aten.slice.Tensor, linear, 1, *at) for at in ((0, 2), (2, 4))]
    y = b.call(aten.mul.Tensor, b.call(aten.relu.default, parts[0]), parts[1])
    cast = [b.call(aten._to_copy.default, part, dtype=F32) for part in parts]
    z = b.call(aten.mul.Tensor, b.call(aten.silu.default, cast[0]), cast[1])
    result = fuse(b.done(y, z), FuseGate)

    assert not result.modified
    found = [(miss.code, miss.at) for _, miss in result.misses]
    assert found == [(MissCode.DTYPE, parts[0]), (MissCode.PATTERN, z)]


def test_refuses_results_in_another_order_than_rows() -> None:
    case = Case(3)
    act = case.b.call(aten.silu.default, halves(case)[0])
    y = case.b.call(aten.mul.Tensor, act, halves(case)[1])
    # What a compiler may say of a product that it lays out itself.
    y.meta["val"] = y.meta["val"].transpose(0, 1).contiguous().transpose(0, 1)
    miss = only_miss(case.done(y), FuseGate)

    assert (miss.code, miss.at) == (MissCode.SHAPE, y)
    assert "not row-major" in miss.reason


def test_refuses_operands_that_broadcast() -> None:
    case = Case()
    act = case.b.call(aten.silu.default, case.b.call(aten.slice.Tensor, case.y, 1, 0, 2))
    up = case.b.call(aten.slice.Tensor, case.y, 1, 2, 3)
    y = case.b.call(aten.mul.Tensor, act, up)
    miss = only_miss(case.done(y), FuseGate)

    assert (miss.code, miss.at) == (MissCode.SHAPE, up)
    assert "broadcasts to" in miss.reason


def test_refuses_an_activation_that_others_read() -> None:
    case = Case()
    gate, up = halves(case)
    act = case.b.call(aten.silu.default, gate)
    y = case.b.call(aten.mul.Tensor, act, up)
    miss = only_miss(case.done(y, act), FuseGate)

    assert (miss.code, miss.at) == (MissCode.SHARED, act)


def test_refuses_a_product_of_no_activation() -> None:
    case = Case()
    program = case.done(case.b.call(aten.mul.Tensor, *halves(case)))

    assert not fuse(program, FuseGate).modified
    assert epilogues(program) == []
