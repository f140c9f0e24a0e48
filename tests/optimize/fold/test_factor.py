from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.matmul import Products
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops.matmul import FusedMatmul, as_fused_matmul
from qfuse.ir.stages.verify import verify
from qfuse.optimize import optimize
from qfuse.optimize.fold.factor import SinkFactor, SinkPowerOfTwo
from qfuse.rewrite.clone import clone
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Miss
from qfuse.testing.quant import per_tensor
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten
F32 = torch.float32
RULES = (SinkPowerOfTwo, SinkFactor)


def fused(program: NormalGraph, *, exact: bool = False, **sizes: int) -> FusedMatmul:
    """Optimize; values stay, to the bit or as near to float64. Return the only product."""
    source = clone(program)
    done = optimize(program)
    inputs = random_inputs(source, **sizes)
    (want,), (got,) = run(source, inputs), run(done, inputs)
    assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
    eps = torch.finfo(want.dtype).eps
    near = torch.allclose(got, want, rtol=8 * eps, atol=16 * eps * float(want.abs().max()))
    assert torch.equal(got, want) if exact else near
    (found,) = [view for node in done.graph.nodes if (view := as_fused_matmul(node))]
    return found


def fired(program: NormalGraph) -> dict[str, int]:
    """Apply the two rules."""
    result = apply_rules(program, [rule() for rule in RULES])
    verify(program)
    return dict(result.fired)


def refusal(program: NormalGraph) -> Miss:
    """Return why neither rule fires."""
    before = to_text(program.graph)
    result = apply_rules(program, [rule() for rule in RULES])
    assert not result.modified
    assert to_text(program.graph) == before
    (miss,) = [m for _, m in result.misses]
    return miss


def scaled(case: Products, factor: Any, op: Any = aten.mul.Tensor) -> NormalGraph:
    """Finish with a product whose left operand is scaled."""
    x = case.b.call(op, case.x, factor)
    return case.done(case.b.call(aten.matmul.default, x, case.other))


def tail(program: NormalGraph) -> str:
    """Return the product and what follows it."""
    return "\n".join(to_text(program.graph).splitlines()[-5:])


def typed(dtype: torch.dtype) -> Products:
    """Two operands that are dequantized to a dtype."""
    left, right = (
        replace(per_tensor(4, stored), float_dtype=dtype) for stored in (torch.uint8, torch.int8)
    )
    return Products(specs=(left, right), float_dtype=dtype)


def test_golden_the_result_is_scaled() -> None:
    case = Products()
    program = scaled(case, 0.3)

    assert fired(program) == {"sink-factor": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[2, 3, s0, 8]
const %x_scale: float32[1, 1, 1, 1]
const %x_zero: int32[1, 1, 1, 1]
%0 = qfuse.quantize(%x, %x_scale, %x_zero, 'uint8[0,255] *x*x*x* float32 float32:reciprocal:round-zp int'): uint8[2, 3, s0, 8]
%1 = qfuse.dequantize(%0, %x_scale, %x_zero, 'uint8[0,255] *x*x*x* float32 float32:reciprocal:round-zp int'): float32[2, 3, s0, 8]
%k: float32[2, 3, 5, 8]
const %k_scale: float32[1, 1, 1, 1]
const %k_zero: int32[1, 1, 1, 1]
%2 = qfuse.quantize(%k, %k_scale, %k_zero, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int'): int8[2, 3, 5, 8]
%3 = qfuse.dequantize(%2, %k_scale, %k_zero, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int'): float32[2, 3, 5, 8]
%4 = aten.transpose.int(%3, -1, -2): float32[2, 3, 8, 5]
%5 = aten.matmul(%1, %4): float32[2, 3, s0, 5]
%6 = aten.mul.Tensor(%5, 0.3): float32[2, 3, s0, 5]
return (%6)""",
    )


def test_golden_rows_of_keys_are_columns_of_the_result() -> None:
    case = Products()
    k = case.b.call(aten.mul.Tensor, case.k, case.b.const("factor", torch.rand(5, 1) + 0.1))
    turned = case.b.call(aten.transpose.int, k, -1, -2)
    program = case.done(case.b.call(aten.matmul.default, case.x, turned))

    assert fired(program) == {"sink-factor": 1}
    assert_expected_inline(
        tail(program),
        """\
%4 = aten.permute(%3, (0, 1, 3, 2)): float32[2, 3, 8, 5]
%5 = aten.matmul(%1, %4): float32[2, 3, s0, 5]
const %factor_1: float32[1, 1, 1, 5]
%6 = aten.mul.Tensor(%5, %factor_1): float32[2, 3, s0, 5]
return (%6)""",
    )


def test_golden_a_power_of_two() -> None:
    program = scaled(Products(), 0.125)

    assert fired(program) == {"sink-power-of-two": 1}
    assert_expected_inline(
        tail(program),
        """\
%3 = qfuse.dequantize(%2, %k_scale, %k_zero, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int'): float32[2, 3, 5, 8]
%4 = aten.transpose.int(%3, -1, -2): float32[2, 3, 8, 5]
%5 = aten.matmul(%1, %4): float32[2, 3, s0, 5]
%6 = aten.mul.Tensor(%5, 0.125): float32[2, 3, s0, 5]
return (%6)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("factor", [0.125, -4, 2.0**-60, 0.3, -0.3, 3, 0.0, 1 / math.sqrt(8)])
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
def test_numbers(factor: float, dtype: torch.dtype) -> None:
    program = scaled(typed(dtype), factor)
    power = factor != 0 and abs(math.frexp(factor)[0]) == 0.5

    assert fired(clone(program)) == {"sink-power-of-two" if power else "sink-factor": 1}
    found = fused(program, exact=power, m=7)
    # A narrow dtype would round the number, which then stays behind the product.
    if dtype is F32:
        assert str(found.epilogue) == "mul(0)"


@pytest.mark.numeric
@pytest.mark.parametrize("divisor", [8, math.sqrt(8), -3.0])
def test_quotients(divisor: float) -> None:
    program = scaled(Products(), divisor, aten.div.Tensor)

    assert fused(program, exact=divisor == 8, m=7).x_params is not None


@pytest.mark.numeric
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("above", [True, False])
def test_the_right_operand(first: bool, above: bool) -> None:
    case = Products()
    source = case.k if above else case.other
    other = case.b.call(aten.mul.Tensor, source, 0.3)
    if not first:
        number = case.b.const("number", torch.tensor(0.3))
        other = case.b.call(aten.mul.Tensor, number, source)
    if above:
        other = case.b.call(aten.transpose.int, other, -1, -2)
    program = case.done(case.b.call(aten.matmul.default, case.x, other))

    assert str(fused(program, m=7).epilogue) == "mul(0)"


@pytest.mark.numeric
def test_both_operands() -> None:
    case = Products()
    x, k = (case.b.call(aten.mul.Tensor, value, 0.35) for value in (case.x, case.k))
    turned = case.b.call(aten.transpose.int, k, -1, -2)
    program = case.done(case.b.call(aten.matmul.default, x, turned))

    assert fired(clone(program)) == {"sink-factor": 2}
    assert str(fused(program, m=7).epilogue) == "mul(0)|mul(1)"


SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "x": ((), (1,), (3, 1, 1), (2, 3, 1, 1), (1, 1, 1, 1), (2, 1, 4, 1)),
    "other": ((), (5,), (3, 1, 1), (2, 1, 1, 5), (1, 5)),
}


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("side", "shape"), [(side, shape) for side, shapes in SHAPES.items() for shape in shapes]
)
@pytest.mark.parametrize("known", [True, False])
def test_tensors(side: str, shape: tuple[int, ...], known: bool) -> None:
    case = Products((2, 3, 4, 8))
    factor = factor_of(case, *shape, known=known)
    x, other = case.x, case.other
    if side == "x":
        x = case.b.call(aten.mul.Tensor, x, factor)
    else:
        other = case.b.call(aten.mul.Tensor, other, factor)
    found = fused(case.done(case.b.call(aten.matmul.default, x, other)))

    assert str(found.epilogue) == "mul(0)"


@pytest.mark.numeric
def test_the_scaled_operand_has_other_users() -> None:
    case = Products()
    x = case.b.call(aten.mul.Tensor, case.x, 0.3)
    product = case.b.call(aten.matmul.default, x, case.other)
    program = case.done(product, case.b.call(aten.exp.default, x))
    source = clone(program)
    done = optimize(program)
    assert any(as_fused_matmul(node) for node in done.graph.nodes)
    inputs = random_inputs(source, m=4)
    for got, want in zip(run(done, inputs), run(source, inputs), strict=True):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)


def factor_of(case: Products, *shape: int, known: bool = True) -> Node:
    """A constant, or an input."""
    if not known:
        return case.b.arg("factor", F32, *shape)
    return case.b.const("factor", torch.rand(shape) + 0.1)


@pytest.mark.parametrize("shape", [(8,), (1, 8), (3, 4, 8)])
def test_refuses_a_factor_along_the_summed_axis(shape: tuple[int, ...]) -> None:
    case = Products((2, 3, 4, 8))

    miss = refusal(scaled(case, factor_of(case, *shape)))
    assert miss.code is MissCode.AXIS
    text = f"a factor of shape {shape} is not one number per row or column of the result"
    assert miss.reason == text


@pytest.mark.parametrize(
    ("shape", "x", "axes"),
    [
        ((8,), (2, 3, 4, 8), (0, 1, 3, 2)),
        ((5, 8), (2, 3, 4, 8), (0, 1, 3, 2)),
        ((3, 1, 1), (2, 5, 4, 3), (0, 2, 1, 3)),
    ],
)
def test_refuses_what_a_movement_turns_to_the_summed_axis(
    shape: tuple[int, ...], x: tuple[int, ...], axes: tuple[int, ...]
) -> None:
    case = Products(x)
    k = case.b.call(aten.mul.Tensor, case.k, factor_of(case, *shape))
    turned = case.b.call(aten.permute.default, k, list(axes))
    miss = refusal(case.done(case.b.call(aten.matmul.default, case.x, turned)))

    assert miss.code is MissCode.AXIS
    assert "is not one number per row or column" in miss.reason


@pytest.mark.parametrize(("size", "why"), [(30, "one number per row"), (10, "does not move below")])
def test_refuses_a_view_that_mixes_values(size: int, why: str) -> None:
    # One value for several rows in a row, and for rows apart.
    case = Products((2, 3, 4, 8), (2, 3, 10, 8))
    shape = (3, 1, 1) if size == 30 else (2, 1, 1, 1)
    k = case.b.call(aten.mul.Tensor, case.k, factor_of(case, *shape))
    flat = case.b.call(aten.reshape.default, k, [2, 30, 8] if size == 30 else [3, 20, 8])
    turned = case.b.call(aten.transpose.int, flat, -1, -2)
    x = case.b.call(aten.reshape.default, case.x, [2, 12, 8] if size == 30 else [3, 8, 8])
    miss = refusal(case.done(case.b.call(aten.matmul.default, x, turned)))

    assert miss.code is MissCode.AXIS
    assert why in miss.reason


MOVED: dict[str, tuple[tuple[int, ...], Any]] = {
    "tokens": ((5, 1), lambda _, k: k),
    "tokens of each head": ((2, 3, 5, 1), lambda _, k: k),
    "heads": ((3, 1, 1), lambda _, k: k),
    "some tokens": ((5, 1), lambda b, k: b.call(aten.slice.Tensor, k, 2, 1, 4)),
    "tokens backwards": ((5, 1), lambda b, k: b.call(aten.flip.default, k, [2])),
    "chosen tokens": (
        (5, 1),
        lambda b, k: b.call(aten.index_select.default, k, 2, b.arg("index", torch.int64, "n")),
    ),
    "one batch": ((2, 1, 1, 1), lambda b, k: b.call(aten.select.int, k, 0, 1)),
    "a batch of heads": ((1, 3, 1, 1), lambda b, k: b.call(aten.reshape.default, k, [2, 3, 5, 8])),
}


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("case", MOVED)
@pytest.mark.parametrize("op", [aten.mul.Tensor, aten.div.Tensor])
@pytest.mark.parametrize("known", [True, False])
def test_values_that_move_with_their_operand(case: str, op: Any, known: bool) -> None:
    graph = Products((2, 3, 4, 8))
    b = graph.b
    shape, move = MOVED[case]
    k = move(b, b.call(op, graph.k, factor_of(graph, *shape, known=known)))
    turned = b.call(aten.transpose.int, k, -1, -2)
    program = graph.done(b.call(aten.matmul.default, graph.x, turned))
    source = clone(program)

    assert fired(program) == {"sink-factor": 1}
    inputs = random_inputs(source, n=3)
    if case == "chosen tokens":
        inputs = [x % 5 if x.dtype is torch.int64 else x for x in inputs]
    (want,), (got,) = run(source, inputs), run(program, inputs)
    assert (got.shape, got.stride()) == (want.shape, want.stride())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6 * float(want.abs().max()))


@pytest.mark.numeric
def test_a_moved_factor_is_in_the_kernel() -> None:
    case = Products()
    k = case.b.call(aten.mul.Tensor, case.k, factor_of(case, 5, 1))
    turned = case.b.call(aten.transpose.int, k, -1, -2)
    program = case.done(case.b.call(aten.matmul.default, case.x, turned))

    assert str(fused(program, m=7).epilogue) == "mul(0)"


@pytest.mark.parametrize(
    ("factor", "op"),
    [(math.inf, aten.mul.Tensor), (math.nan, aten.mul.Tensor), (0, aten.div.Tensor)],
)
def test_refuses_what_is_not_finite(factor: float, op: Any) -> None:
    miss = refusal(scaled(Products(), factor, op))
    assert miss.code is MissCode.RANGE
    assert miss.reason == "the constant is not finite, or divides by 0"


def test_refuses_float16() -> None:
    miss = refusal(scaled(typed(torch.float16), 0.125))
    assert miss.code is MissCode.DTYPE
    assert miss.reason == "it is computed in torch.float16, and its operand is torch.float16"


def test_refuses_a_factor_that_broadcasts() -> None:
    case = Products((1, 1, 4, 8), (2, 3, 5, 8))

    miss = refusal(scaled(case, factor_of(case, 2, 1, 1, 1)))
    assert miss.code is MissCode.SHAPE
    assert miss.reason == "it broadcasts its operand of shape (1, 1, 4, 8)"


def test_refuses_a_vector() -> None:
    case = Products((2, 3, 4, 8))
    vector = case.quantized(case.b.arg("v", F32, 8), per_tensor(1), "v")
    x = case.b.call(aten.mul.Tensor, case.x, 0.3)

    miss = refusal(case.done(case.b.call(aten.matmul.default, x, vector)))
    assert miss.code is MissCode.SHAPE


@pytest.mark.parametrize("kind", ["every element", "float", "divides", "weight"])
def test_what_is_not_its_business(kind: str) -> None:
    case = Products((2, 3, 4, 8))
    b, x, other = case.b, case.x, case.other
    if kind == "every element":
        x = b.call(aten.mul.Tensor, x, b.arg("factor", F32, 2, 3, 4, 8))
    elif kind == "float":
        x = b.call(aten.mul.Tensor, b.arg("plain", F32, 2, 3, 4, 8), 0.3)
    elif kind == "divides":
        x = b.call(aten.div.Tensor, factor_of(case), x)
    else:
        x = b.call(aten.mul.Tensor, x, 0.3)
        other = b.const("w", torch.rand(8, 5))
    program = case.done(b.call(aten.matmul.default, x, other))
    result = apply_rules(program, [rule() for rule in RULES])

    assert (result.modified, list(result.misses)) == (False, [])


def test_refuses_a_factor_at_run_time_along_the_summed_axis() -> None:
    case = Products((2, 3, 4, 8))

    assert refusal(scaled(case, case.b.arg("factor", F32, 4, 8))).code is MissCode.AXIS
