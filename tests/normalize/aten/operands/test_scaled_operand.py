"""Activations that are scaled in several steps, divided, or cast behind their scale."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    calls,
    codes,
    finish,
    golden,
    refusal,
    scales,
)
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.ir.ops import library as ops
from qfuse.normalize.aten.operands.scaled_operand import DequantizeScaledOperand
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_channel, per_tensor
from qfuse.testing.run import run

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
RULE = DequantizeScaledOperand()
TENSOR = str(per_tensor(3))


class Activation:
    """Quantized values that a layer or a product reads.

    Args:
        stored: Their dtype.
        shape: Their shape.
    """

    def __init__(
        self, stored: torch.dtype = torch.int8, shape: tuple[int, ...] = (2, 3, 8)
    ) -> None:
        self.b = GraphBuilder()
        self.q = self.b.arg("q", stored, *shape)
        self.inputs = [codes(*shape, dtype=stored)]

    def arg(self, *shape: int, dtype: torch.dtype = F32) -> Node:
        """Add a scale that is an input."""
        value = scales(*shape, dtype=dtype)
        self.inputs.append(value)
        return self.b.arg(f"s{len(self.inputs)}", dtype, *shape)

    def zero(self, *shape: int, dtype: torch.dtype) -> Node:
        """Add a zero point that is an input."""
        self.inputs.append(codes(*shape, dtype=torch.int8).to(dtype))
        return self.b.arg(f"z{len(self.inputs)}", dtype, *shape)

    def real(self, dtype: torch.dtype = F32) -> Node:
        """Cast the values."""
        return self.b.call(aten._to_copy.default, self.q, dtype=dtype)

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        """Cast."""
        return self.b.call(aten._to_copy.default, x, dtype=dtype)

    def mul(self, x: Node, by: Node | float) -> Node:
        """Multiply."""
        return self.b.call(aten.mul.Tensor, x, by)

    def div(self, x: Node, by: Node | float) -> Node:
        """Divide."""
        return self.b.call(aten.div.Tensor, x, by)

    def linear(self, x: Node, *, quantized: bool = True) -> CapturedGraph:
        """Finish with a linear."""
        dtype = x.meta["val"].dtype
        if not quantized:
            return finish(
                self.b, self.b.call(aten.linear.default, x, self.b.const("f", torch.rand(5, 8)))
            )
        w, t = self.b.const("w", codes(5, 8)), self.b.const("t", scales(5, 1))
        spec = str(per_channel(2)).replace("float32 float32", f"{str(dtype)[6:]} float32", 1)
        weight = self.b.call(ops.dequantize, w, t, None, spec)
        return finish(self.b, self.b.call(aten.linear.default, x, weight))


Build = Callable[[Activation], Node]


def test_golden_a_divisor_and_a_factor() -> None:
    a = Activation()
    x = a.mul(a.div(a.real(), a.arg()), a.arg(2, 3, 1))
    assert_expected_inline(
        golden(a.linear(x), RULE),
        """\
%q: int8[2, 3, 8]
%s2: float32[]
%s3: float32[2, 3, 1]
const %w: int8[5, 8]
const %t: float32[5, 1]
%0 = qfuse.dequantize(%w, %t, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[5, 8]
%1 = aten.unsqueeze(%s2, 0): float32[1]
%2 = aten.unsqueeze(%1, 0): float32[1, 1]
%3 = aten.unsqueeze(%2, 0): float32[1, 1, 1]
%4 = aten.div.Tensor(%s3, %3): float32[2, 3, 1]
%5 = aten.eq.Scalar(%3, 0): bool[1, 1, 1]
%6 = aten.isinf(%s3): bool[2, 3, 1]
%7 = aten.logical_or(%5, %6): bool[2, 3, 1]
%8 = aten.clamp(%4, -3.4028234663852886e+38, 3.4028234663852886e+38): float32[2, 3, 1]
%9 = aten.where.self(%7, %4, %8): float32[2, 3, 1]
%10 = qfuse.dequantize(%q, %9, None, 'int8[-128,127] 1x1x* float32 float32:reciprocal:round-zp int'): float32[2, 3, 8]
%11 = aten.linear(%10, %0): float32[2, 3, 5]
return (%11)
fired: dequantize-scaled-operand 1""",
    )


def test_golden_a_cast_behind_the_scale() -> None:
    a = Activation()
    assert_expected_inline(
        golden(a.linear(a.cast(a.mul(a.real(), a.arg(3, 1)), BF16)), RULE),
        """\
%q: int8[2, 3, 8]
%s2: float32[3, 1]
const %w: int8[5, 8]
const %t: float32[5, 1]
%0 = qfuse.dequantize(%w, %t, None, 'int8[-128,127] 1x* bfloat16 float32:reciprocal:round-zp int'): bfloat16[5, 8]
%1 = aten.unsqueeze(%s2, 0): float32[1, 3, 1]
%2 = qfuse.dequantize(%q, %1, None, 'int8[-128,127] *x1x* bfloat16 float32:reciprocal:round-zp int'): bfloat16[2, 3, 8]
%3 = aten.linear(%2, %0): bfloat16[2, 3, 5]
return (%3)
fired: dequantize-scaled-operand 1""",
    )


SPELLINGS: dict[str, Build] = {
    "a divisor per row": lambda a: a.div(a.real(), a.arg(2, 3, 1)),
    "a divisor": lambda a: a.div(a.real(), a.arg()),
    "a number that divides": lambda a: a.div(a.real(), 127.0),
    "a number after a factor": lambda a: a.div(a.mul(a.real(), a.arg(2, 3, 1)), 127.0),
    "a number before a factor": lambda a: a.mul(a.mul(a.real(), 0.3), a.arg(1, 1, 1)),
    "factors of other axes": lambda a: a.mul(a.mul(a.real(), a.arg(2, 1, 1)), a.arg(3, 1)),
    "two divisors": lambda a: a.div(a.div(a.real(), a.arg(3, 1)), a.arg()),
    "integers": lambda a: a.mul(a.q, a.arg(2, 3, 1)),
    "cast to 16 bits": lambda a: a.cast(a.mul(a.real(), a.arg(2, 3, 1)), F16),
    "divided and cast": lambda a: a.cast(a.div(a.real(), a.arg(2, 3, 1)), BF16),
    "scales of 16 bits": lambda a: a.div(a.mul(a.real(F16), a.arg(dtype=F16)), a.arg(dtype=F16)),
    "scales of 64 bits": lambda a: a.cast(a.mul(a.real(F64), a.arg(3, 1, dtype=F64)), F32),
    "a zero point": lambda a: a.div(
        a.b.call(aten.sub.Tensor, a.real(), a.zero(2, 3, 1, dtype=torch.int8)), a.arg()
    ),
    "factors above a dequantize": lambda a: a.mul(
        a.mul(
            a.b.call(ops.dequantize, a.q, a.b.const("c", torch.full((1, 1, 1), 0.3)), None, TENSOR),
            a.arg(2, 3, 1),
        ),
        2.5,
    ),
    "moved": lambda a: a.b.call(aten.view.default, a.div(a.real(), a.arg(2, 3, 1)), [6, 8]),
}


@pytest.mark.numeric
@pytest.mark.parametrize("stored", [torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name: str, stored: torch.dtype) -> None:
    if "dequantize" in name:
        stored = torch.int8
    a = Activation(stored)
    program = a.linear(SPELLINGS[name](a))

    assert assert_same_values(program, a.inputs, RULE).fired == {RULE.name: 1}
    assert calls(program).count("qfuse.dequantize") == 2
    assert "aten.linear" in calls(program)


@pytest.mark.numeric
def test_a_product_of_two_activations() -> None:
    a = Activation(shape=(2, 4, 8))
    k = a.b.arg("k", torch.int8, 2, 5, 8)
    a.inputs.append(codes(2, 5, 8))
    key = a.div(a.cast(k, F32), a.arg(2, 5, 1))
    q = a.b.call(
        ops.dequantize, a.q, a.b.const("one", torch.full((1, 1, 1), 0.05)), None, str(per_tensor(3))
    )
    turned = a.b.call(aten.transpose.int, key, -1, -2)
    program = finish(a.b, a.b.call(aten.matmul.default, q, turned))

    assert assert_same_values(program, a.inputs, RULE).fired == {RULE.name: 1}
    assert calls(program).count("qfuse.dequantize") == 2


@pytest.mark.numeric
@pytest.mark.parametrize("factors", [0, 1])
def test_a_divisor_without_a_reciprocal_keeps_zeros(factors: int) -> None:
    a = Activation()
    x = a.real()
    for _ in range(factors):
        x = a.mul(x, a.arg(2, 3, 1))
    program = a.linear(a.div(x, a.arg(2, 3, 1)))
    a.inputs[0][:, 1:] = 0
    # The last one is no number of float32 when it is inverted, and zero gives NaN.
    a.inputs[-1][:, 1] = 1e-41
    a.inputs[-1][0, 2] = 0

    want = run(program, a.inputs)[0]
    apply_rules(program, [RULE])
    program.module.recompile()
    got = run(program, a.inputs)[0]
    assert bool((want[:, 1] == 0).all())
    assert bool(want[0, 2].isnan().all())
    assert torch.equal(got.isnan(), want.isnan())
    # Terms of both signs cancel, so an error is one of their magnitudes: of 8 products and sums, of
    # scaling, and of scaling in another order.
    w, t = program.module.get_buffer("w").float(), program.module.get_buffer("t")
    values = a.inputs[0].float().abs() * math.prod(a.inputs[1:-1]) / a.inputs[-1]
    most = 16 * torch.finfo(F32).eps * (values @ (w.abs() * t).mT)
    assert bool((((got - want).abs() <= most) | want.isnan()).all())


def test_a_dequantize_alone_stays() -> None:
    a = Activation()
    one = a.b.const("c", torch.full((1, 1, 1), 0.3))
    program = a.linear(a.b.call(ops.dequantize, a.q, one, None, TENSOR))
    assert refusal(program, RULE)[0] is MissCode.PATTERN


def test_what_multiplies_a_dequantize_need_not_be_a_scale() -> None:
    a = Activation()
    one = a.b.const("c", torch.full((1, 1, 1), 0.3))
    x = a.b.call(ops.dequantize, a.q, one, None, TENSOR)
    program = a.linear(a.mul(x, a.arg(2, 3, 8)))
    assert not [miss for _, miss in apply_rules(program, [RULE]).misses if miss.progress > 1]


REFUSALS: dict[str, tuple[MissCode, Build]] = {
    "one scale per element": (
        MissCode.GRANULARITY,
        lambda a: a.mul(a.mul(a.real(), a.arg(2, 3, 1)), a.arg(8)),
    ),
    "rounded twice": (
        MissCode.ARITHMETIC,
        lambda a: a.cast(a.mul(a.real(BF16), a.arg(dtype=BF16)), F32),
    ),
    "in float64": (MissCode.DTYPE, lambda a: a.div(a.real(F64), a.arg(dtype=F64))),
    "a zero point in floats": (
        MissCode.NOT_CONSTANT,
        lambda a: a.div(a.b.call(aten.sub.Tensor, a.real(), a.zero(dtype=F32)), a.arg()),
    ),
    "a zero point behind the scale": (
        MissCode.ORDER,
        lambda a: a.b.call(aten.sub.Tensor, a.mul(a.real(), a.arg()), a.arg(2, 3, 1)),
    ),
    "a negative number": (MissCode.RANGE, lambda a: a.div(a.real(), -2.0)),
    "zero": (MissCode.RANGE, lambda a: a.div(a.real(), 0.0)),
    "a factor per element": (MissCode.SHAPE, lambda a: a.mul(a.real(), a.arg(2, 3, 8))),
    "an op behind the scale": (
        MissCode.NOT_QUANTIZED,
        lambda a: a.b.call(aten.leaky_relu.default, a.mul(a.real(), a.arg())),
    ),
    "a relu with a scale of any sign": (
        MissCode.RANGE,
        lambda a: a.b.call(aten.relu.default, a.mul(a.real(), a.arg())),
    ),
    "rounded floats": (
        MissCode.DTYPE,
        lambda a: a.mul(a.b.call(aten.round.default, a.arg(2, 3, 8)), a.arg(2, 3, 1)),
    ),
    "wide integers": (MissCode.RANGE, lambda a: a.mul(a.real(), a.arg())),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(name: str) -> None:
    code, build = REFUSALS[name]
    a = Activation(torch.int32 if name == "wide integers" else torch.int8)

    assert refusal(a.linear(build(a)), RULE)[0] is code


def test_refuses_a_float_weight() -> None:
    a = Activation()
    program = a.linear(a.div(a.real(), a.arg()), quantized=False)
    assert refusal(program, RULE) == (MissCode.PATTERN, "linear_default")
