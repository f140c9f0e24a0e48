"""ReLUs, masks and concatenations between a scale of run time and its product."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from tests.normalize.aten.operands.test_scaled_operand import TENSOR, Activation
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    calls,
    codes,
    golden,
    refusal,
    scales,
)
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.ops import library as ops
from qfuse.normalize import normalize
from qfuse.normalize.aten.operands.lift_above_scale import LiftAboveScale
from qfuse.rewrite.driver import apply_rules

F32, BF16 = torch.float32, torch.bfloat16
RULE = LiftAboveScale()
Build = Callable[[Activation], Node]


def positive(a: Activation, *shape: int, dtype: torch.dtype = F32) -> Node:
    """A scale that is not negative."""
    return a.b.call(aten.clamp.default, a.arg(*shape, dtype=dtype), min=1e-6)


def relu(a: Activation, x: Node) -> Node:
    return a.b.call(aten.relu.default, x)


def mask(a: Activation, *shape: int) -> Node:
    a.inputs.append(torch.rand(shape) > 0.5)
    return a.b.arg(f"mask{len(a.inputs)}", torch.bool, *shape)


def shifted(a: Activation) -> Node:
    return a.b.call(aten.sub.Tensor, a.real(), 3)


def other(a: Activation, *shape: int, stored: torch.dtype = torch.int8) -> Node:
    """More values."""
    a.inputs.append(codes(*shape, dtype=stored))
    return a.cast(a.b.arg(f"q{len(a.inputs)}", stored, *shape), F32)


def joined(a: Activation, axis: int, *parts: Node) -> Node:
    return a.b.call(aten.cat.default, list(parts), axis)


def test_golden_a_relu() -> None:
    a = Activation()
    assert_expected_inline(
        golden(a.linear(relu(a, a.mul(shifted(a), positive(a, 2, 3, 1)))), RULE),
        """\
%q: int8[2, 3, 8]
%s2: float32[2, 3, 1]
%0 = aten.clamp(%s2, min=1e-06): float32[2, 3, 1]
%1 = aten.clamp(%q, min=3): int8[2, 3, 8]
%2 = aten._to_copy(%1, dtype=float32): float32[2, 3, 8]
%3 = aten.sub.Tensor(%2, 3): float32[2, 3, 8]
%4 = aten.mul.Tensor(%3, %0): float32[2, 3, 8]
const %w: int8[5, 8]
const %t: float32[5, 1]
%5 = qfuse.dequantize(%w, %t, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[5, 8]
%6 = aten.linear(%4, %5): float32[2, 3, 5]
return (%6)
fired: lift-above-scale 1""",
    )


def test_golden_a_concatenation_of_rows() -> None:
    a = Activation()
    parts = a.mul(a.real(), a.arg(3, 1)), a.mul(other(a, 2, 5, 8), a.arg())
    assert_expected_inline(
        golden(a.linear(joined(a, 1, *parts)), RULE),
        """\
%q: int8[2, 3, 8]
%s2: float32[3, 1]
%q3: int8[2, 5, 8]
%s4: float32[]
%0 = aten.cat((%q, %q3), 1): int8[2, 8, 8]
%1 = aten._to_copy(%0, dtype=float32): float32[2, 8, 8]
%2 = aten.unsqueeze(%s2, 0): float32[1, 3, 1]
%3 = aten.unsqueeze(%s4, 0): float32[1]
%4 = aten.unsqueeze(%3, 0): float32[1, 1]
%5 = aten.unsqueeze(%4, 0): float32[1, 1, 1]
%6 = aten.expand(%5, (-1, 5, -1)): float32[1, 5, 1]
%7 = aten.cat((%2, %6), 1): float32[1, 8, 1]
%8 = aten.mul.Tensor(%1, %7): float32[2, 8, 8]
const %w: int8[5, 8]
const %t: float32[5, 1]
%9 = qfuse.dequantize(%w, %t, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[5, 8]
%10 = aten.linear(%8, %9): float32[2, 8, 5]
return (%10)
fired: lift-above-scale 1""",
    )


def _same_scale(a: Activation, axis: int, *shape: int) -> Node:
    s = a.arg()
    return joined(a, axis, a.mul(a.real(), s), a.mul(other(a, *shape), s))


def _dequantized(a: Activation) -> Node:
    one = a.b.const("c", torch.full((1, 1, 1), 0.3))
    return a.b.call(ops.dequantize, a.q, one, None, TENSOR)


SPELLINGS: dict[str, Build] = {
    "relu": lambda a: relu(a, a.mul(a.real(), positive(a, 2, 3, 1))),
    "relu before the scale": lambda a: a.mul(relu(a, a.real()), a.arg(2, 3, 1)),
    "relu between scales": lambda a: a.mul(relu(a, a.div(a.real(), 127.0)), a.arg()),
    "relu of a difference": lambda a: relu(a, a.mul(shifted(a), positive(a))),
    "relu of a cast": lambda a: relu(a, a.cast(a.mul(a.real(), positive(a)), BF16)),
    "relu above a dequantize": lambda a: relu(a, a.mul(_dequantized(a), positive(a, 2, 3, 1))),
    "clamp": lambda a: a.b.call(aten.clamp.default, a.div(a.real(), positive(a)), min=0),
    "masked_fill": lambda a: a.b.call(
        aten.masked_fill.Scalar, a.mul(shifted(a), a.arg(2, 3, 1)), mask(a, 3, 8), 0
    ),
    "where": lambda a: a.b.call(
        aten.where.ScalarOther, mask(a, 2, 3, 8), a.mul(a.real(), a.arg()), 0.0
    ),
    "where of zero": lambda a: a.b.call(
        aten.where.ScalarSelf, mask(a, 2, 3, 1), 0.0, a.mul(shifted(a), a.arg())
    ),
    "where of a constant": lambda a: a.b.call(
        aten.where.self, mask(a, 8), a.mul(a.real(), a.arg()), a.b.const("nil", torch.zeros(()))
    ),
    "cat of features": lambda a: a.b.call(aten.slice.Tensor, _same_scale(a, 2, 2, 3, 4), 2, 2, 10),
    "cat of rows": lambda a: _same_scale(a, 1, 2, 4, 8),
    "cat of scales": lambda a: joined(
        a, 1, a.mul(a.real(), a.arg(2, 3, 1)), a.mul(other(a, 2, 5, 8), a.arg(2, 5, 1))
    ),
    "cat of two scales": lambda a: joined(
        a, 1, a.mul(a.real(), a.arg(3, 1)), a.mul(other(a, 2, 5, 8), a.arg())
    ),
    "cat of a dequantize": lambda a: joined(
        a, 1, _dequantized(a), a.mul(other(a, 2, 5, 8), a.arg())
    ),
    "cat of differences": lambda a: joined(
        a,
        1,
        a.mul(a.b.call(aten.sub.Tensor, a.real(), a.b.const("z", torch.full((3, 1), 5))), a.arg()),
        a.mul(a.b.call(aten.sub.Tensor, other(a, 2, 5, 8), 5), a.arg()),
    ),
    "padding": lambda a: a.b.call(
        aten.constant_pad_nd.default, a.mul(shifted(a), a.arg(2, 1, 1)), [0, 0, 1, 2]
    ),
    "cat of batches": lambda a: joined(
        a, 0, a.mul(a.real(), a.arg(1, 1)), a.mul(other(a, 4, 3, 8), a.arg())
    ),
}


@pytest.mark.numeric
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name: str) -> None:
    a = Activation()
    program = a.linear(SPELLINGS[name](a))

    assert assert_same_values(program, a.inputs, RULE).fired == {RULE.name: 1}


@pytest.mark.numeric
@pytest.mark.parametrize("name", SPELLINGS)
def test_the_product_reads_quantized_values(name: str) -> None:
    a = Activation()
    program = normalize(a.linear(SPELLINGS[name](a)))
    (linear,) = program.graph.find_nodes(op="call_function", target=aten.linear.default)

    assert calls(program).count("qfuse.dequantize") == 2
    assert "aten.slice.Tensor" in calls(program) or linear.args[0].target is ops.dequantize


@pytest.mark.numeric
def test_one_scale_for_a_part_of_symbolic_size() -> None:
    a = Activation()
    b = a.b
    parts = []
    for name, grid in (("m", "m"), ("n", 1)):
        q = b.arg(f"q{name}", torch.int8, name, 8)
        scale = b.arg(f"scale{name}", F32, grid, 1)
        parts.append(a.mul(a.cast(q, F32), scale))
    program = a.linear(joined(a, 0, *parts))
    inputs = [a.inputs[0], codes(4, 8), scales(4, 1), codes(6, 8), scales(1, 1)]

    assert assert_same_values(program, inputs, RULE).fired == {RULE.name: 1}


@pytest.mark.numeric
def test_a_filled_zero_may_get_the_sign_of_its_scale() -> None:
    a = Activation()
    x = a.b.call(aten.masked_fill.Scalar, a.mul(a.real(), a.arg()), mask(a, 3, 8), 0)
    a.inputs[1] = -a.inputs[1]
    assert assert_same_values(a.linear(x), a.inputs, RULE).fired == {RULE.name: 1}


@pytest.mark.numeric
def test_unsigned_values() -> None:
    a = Activation(torch.uint8)
    program = a.linear(relu(a, a.mul(shifted(a), positive(a, 2, 3, 1))))
    assert assert_same_values(program, a.inputs, RULE).fired == {RULE.name: 1}


def _twice(a: Activation) -> Node:
    spec = TENSOR.replace("*x*x*", "*x1x*")
    rows = a.b.call(ops.dequantize, a.q, a.b.const("c", scales(1, 3, 1)), None, spec)
    part = a.mul(rows, a.arg())
    return joined(a, 1, part, part)


REFUSALS: dict[str, tuple[MissCode, Build]] = {
    "a sign that is not known": (MissCode.RANGE, lambda a: relu(a, a.mul(a.real(), a.arg()))),
    "a negative factor": (
        MissCode.RANGE,
        lambda a: relu(a, a.mul(a.mul(a.real(), positive(a)), -2.0)),
    ),
    "a zero point of run time": (
        MissCode.ZERO_POINT,
        lambda a: relu(
            a, a.mul(a.b.call(aten.sub.Tensor, a.real(), a.zero(dtype=torch.int8)), positive(a))
        ),
    ),
    "a zero point out of range": (
        MissCode.ZERO_POINT,
        lambda a: relu(a, a.mul(a.b.call(aten.sub.Tensor, a.real(), 200), positive(a))),
    ),
    "other scales of features": (
        MissCode.GRANULARITY,
        lambda a: joined(
            a, 2, a.mul(a.real(), a.arg(2, 3, 1)), a.mul(other(a, 2, 3, 8), a.arg(2, 3, 1))
        ),
    ),
    "another order of factors": (
        MissCode.GRANULARITY,
        lambda a: joined(a, 1, a.mul(a.real(), a.arg()), a.div(other(a, 2, 3, 8), a.arg())),
    ),
    "another number": (
        MissCode.PATTERN,
        lambda a: a.b.call(
            aten.masked_fill.Scalar, a.mul(a.real(), a.arg()), mask(a, 2, 3, 8), 1.0
        ),
    ),
    "an upper bound": (
        MissCode.PATTERN,
        lambda a: a.b.call(aten.clamp.default, a.mul(a.real(), positive(a)), 0, 6),
    ),
    "a dequantize with a scale per row": (MissCode.GRANULARITY, _twice),
    "padding of scales": (
        MissCode.PATTERN,
        lambda a: a.b.call(
            aten.constant_pad_nd.default, a.mul(a.real(), a.arg(3, 1)), [0, 0, 1, 2]
        ),
    ),
    "padding with another number": (
        MissCode.PATTERN,
        lambda a: a.b.call(
            aten.constant_pad_nd.default, a.mul(a.real(), a.arg()), [0, 0, 1, 2], 1.0
        ),
    ),
    "cat with a dequantize of another dtype": (
        MissCode.GRANULARITY,
        lambda a: joined(
            a, 1, _dequantized(a), a.cast(a.mul(other(a, 2, 5, 8), a.arg(2, 1, 1)), F32)
        ),
    ),
    "a zero that makes the result wider": (
        MissCode.DTYPE,
        lambda a: a.b.call(
            aten.where.self,
            mask(a, 2, 3, 8),
            a.mul(a.cast(a.q, BF16), a.arg(dtype=BF16)),
            a.b.const("zero", torch.zeros(1)),
        ),
    ),
    "a wider part": (
        MissCode.DTYPE,
        lambda a: a.mul(
            joined(a, 1, a.cast(a.q, BF16), other(a, 2, 3, 8)), a.arg(2, 6, 1, dtype=F32)
        ),
    ),
    "a wider mask": (
        MissCode.PATTERN,
        lambda a: a.b.call(
            aten.where.ScalarOther, mask(a, 5, 1, 1, 8), a.mul(a.real(), a.arg()), 0.0
        ),
    ),
    "other quantized values": (
        MissCode.PATTERN,
        lambda a: _unsigned(a, a.arg()),
    ),
    "a float part": (
        MissCode.PATTERN,
        lambda a: joined(a, 1, a.mul(a.real(), a.arg()), a.arg(2, 3, 8)),
    ),
    "a constant scale": (MissCode.PATTERN, lambda a: relu(a, _dequantized(a))),
}


def _unsigned(a: Activation, s: Node) -> Node:
    parts = a.mul(a.real(), s), a.mul(other(a, 2, 3, 8, stored=torch.uint8), s)
    return joined(a, 1, *parts)


def test_what_a_dequantize_may_sink_below_later_is_not_reported() -> None:
    a = Activation()
    program = a.linear(relu(a, a.mul(_dequantized(a), a.arg())))
    assert not [miss for _, miss in apply_rules(program, [RULE]).misses if miss.progress]


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(name: str) -> None:
    code, build = REFUSALS[name]
    a = Activation()
    x = build(a)
    # A product of 8 features reads the values.
    first = a.b.call(aten.slice.Tensor, x, -1, 0, 8)
    assert refusal(a.linear(first), RULE)[0] is code


def test_refuses_what_no_product_reads() -> None:
    a = Activation()
    x = relu(a, a.mul(a.real(), positive(a)))
    assert refusal(a.b.done(a.b.call(aten.sin.default, x)), RULE)[0] is MissCode.PATTERN
