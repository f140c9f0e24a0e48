from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    calls,
    finish,
    golden,
    refusal,
    scales,
)
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.linear import as_fused_linear
from qfuse.ir.quant.spec import Arithmetic, QuantSpec, ZeroPointDomain
from qfuse.normalize import normalize
from qfuse.normalize.aten.qdq.float_offset import FloatOffset
from qfuse.optimize import optimize
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.build import GraphBuilder

N, K, GROUP = 6, 24, 8
# The block of the scale, and the shape of the scale.
BLOCKS: dict[str, tuple[tuple[int | None, ...], tuple[int, ...]]] = {
    "tensor": ((None, None), (1, 1)),
    "channel": ((1, None), (N, 1)),
    "group": ((1, GROUP), (N, K // GROUP)),
}


class Weight:
    """A dequantized weight ``[N, K]``."""

    def __init__(
        self,
        block: str = "channel",
        *,
        stored: torch.dtype = torch.uint8,
        top: int = 15,
        dtype: torch.dtype = torch.float32,
        zero: bool = False,
    ) -> None:
        self.b, self.dtype = GraphBuilder(), dtype
        kind, shape = BLOCKS[block]
        info = torch.iinfo(stored)
        values = torch.randint(max(info.min, -top), min(info.max, top) + 1, (N, K)).to(stored)
        self.spec = QuantSpec(stored, info.min, info.max, kind, dtype)
        if dtype is torch.float64:
            self.spec = replace(self.spec, arithmetic=Arithmetic(dtype))
        if not zero:
            self.spec = replace(self.spec, domain=ZeroPointDomain.NONE)
        params = [self.b.const("s", scales(*shape))]
        points = self.b.const("p", torch.randint(0, 9, shape, dtype=torch.int32)) if zero else None
        q = self.b.const("q", values)
        self.real = self.b.call(ops.dequantize, q, *params, points, str(self.spec))

    def plus(self, z: Any, op: Any = aten.add.Tensor, *, first: bool = True) -> CapturedGraph:
        """A linear with the sum as its weight."""
        operand = self.b.const("z", z.to(self.dtype)) if isinstance(z, torch.Tensor) else z
        pair = (self.real, operand) if first else (operand, self.real)
        return self.linear(self.b.call(op, *pair))

    def linear(self, weight: Node) -> CapturedGraph:
        """A linear with this weight."""
        x = self.b.arg("x", self.dtype, 3, K)
        return finish(self.b, self.b.call(aten.linear.default, x, weight))


def test_golden_a_summand_per_channel() -> None:
    assert_expected_inline(
        golden(Weight().plus(torch.randn(N, 1)), FloatOffset()),
        """\
const %q: uint8[6, 24]
const %q_scale: float32[6, 1]
const %q_offset: float32[6, 1]
%0 = qfuse.dequantize(%q, %q_scale, %q_offset, 'uint8[0,15] 1x* float32 float32:reciprocal:round-zp float_offset'): float32[6, 24]
%x: float32[3, 24]
%1 = aten.linear(%x, %0): float32[3, 6]
return (%1)
fired: float-offset 1""",
    )


SHAPES = {
    "tensor": [(), (1,), (N, 1), (K,)],
    "channel": [(), (N, 1)],
    "group": [(), (1, 1), (N, 1)],
}
ALL = [(block, shape) for block, shapes in SHAPES.items() for shape in shapes]


@pytest.mark.numeric
@pytest.mark.parametrize(("block", "shape"), ALL, ids=str)
@pytest.mark.parametrize("op", [aten.add.Tensor, aten.sub.Tensor])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_values(block: str, shape: tuple[int, ...], op: Any, dtype: torch.dtype) -> None:
    program = Weight(block, dtype=dtype).plus(torch.randn(shape), op)

    assert_same_values(program, [torch.randn(3, K).to(dtype)], FloatOffset())
    assert str(op) not in calls(program)
    (spec,) = [str(n.args[3]) for n in program.graph.nodes if n.target is ops.dequantize]
    assert QuantSpec.parse(spec).domain is ZeroPointDomain.FLOAT_OFFSET


@pytest.mark.numeric
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(
    ("stored", "top"), [(torch.uint8, 15), (torch.uint8, 255), (torch.int8, 128)]
)
def test_all_values_and_integer_zero_points(stored: torch.dtype, top: int, zero: bool) -> None:
    program = Weight(stored=stored, top=top, zero=zero).plus(torch.randn(N, 1), first=False)

    assert_same_values(program, [torch.randn(3, K)], FloatOffset())
    assert "aten.add.Tensor" not in calls(program)


@pytest.mark.numeric
def test_a_number() -> None:
    program = Weight().plus(-0.37)

    assert_same_values(program, [torch.randn(3, K)], FloatOffset())
    assert "aten.add.Tensor" not in calls(program)


@pytest.mark.numeric
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_number_is_a_double_whatever_the_default_dtype_is(default: torch.dtype) -> None:
    program = Weight(dtype=torch.float64).plus(0.1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        changed = apply_rules(program, [FloatOffset()]).modified
    finally:
        torch.set_default_dtype(before)

    assert changed
    (node,) = [n for n in program.graph.nodes if n.target is ops.dequantize]
    scale, offset = (constant_value(node.args[i]) for i in (1, 2))
    assert scale is not None
    assert offset is not None
    assert offset.dtype is torch.float64
    spec = QuantSpec.parse(str(node.args[3]))
    middle = (spec.quant_min + spec.quant_max + 1) / 2
    assert offset.tolist() == (middle * scale.double() + 0.1).tolist()


@pytest.mark.numeric
def test_a_linear_reads_the_stored_weight() -> None:
    done = optimize(normalize(Weight("group").plus(torch.randn(N, 1))))

    (fused,) = [view for node in done.graph.nodes if (view := as_fused_linear(node))]
    assert fused.weight_params is not None
    assert fused.weight_params.spec.domain is ZeroPointDomain.FLOAT_OFFSET


@pytest.mark.parametrize(
    ("block", "shape"), [("channel", (N, K)), ("channel", (K,)), ("group", (K,)), ("group", (N, K))]
)
def test_refuses_a_summand_per_element(block: str, shape: tuple[int, ...]) -> None:
    assert refusal(Weight(block).plus(torch.randn(shape)), FloatOffset())[0] is MissCode.SHAPE


@pytest.mark.parametrize("odd", [math.inf, math.nan])
def test_refuses_what_is_not_finite(odd: float) -> None:
    z = torch.randn(N, 1)
    z[0] = odd
    assert refusal(Weight().plus(z), FloatOffset())[0] is MissCode.RANGE


@pytest.mark.parametrize("odd", [math.inf, math.nan])
def test_refuses_scales_that_are_not_finite(odd: float) -> None:
    case = Weight()
    scale = constant_value(case.real.args[1])
    assert scale is not None
    scale[0] = odd
    assert refusal(case.plus(torch.randn(N, 1)), FloatOffset())[0] is MissCode.RANGE


def test_refuses_a_product_that_is_less_exact_than_the_sum() -> None:
    case = Weight()
    wide = replace(case.spec, float_dtype=torch.float64)
    case.real.args = (*case.real.args[:3], str(wide))
    case.real.meta["val"] = case.real.meta["val"].double()
    total = case.b.call(aten.add.Tensor, case.real, 0.3)
    assert refusal(finish(case.b, total), FloatOffset())[0] is MissCode.DTYPE


@pytest.mark.parametrize("kind", ["run time", "alpha", "subtracted", "promoted", "broadcast"])
def test_what_is_not_its_business(kind: str) -> None:
    case = Weight(dtype=torch.bfloat16 if kind == "promoted" else torch.float32)
    b, z = case.b, torch.randn(N, 1)
    if kind == "run time":
        weight = b.call(aten.add.Tensor, case.real, b.arg("z", torch.float32, N, 1))
    elif kind == "alpha":
        weight = b.call(aten.add.Tensor, case.real, b.const("z", z), alpha=2)
    elif kind == "subtracted":
        weight = b.call(aten.sub.Tensor, b.const("z", z), case.real)
    elif kind == "promoted":
        weight = b.call(aten.add.Tensor, case.real, b.const("z", z))
    else:
        weight = b.call(aten.add.Tensor, case.real, b.const("z", torch.randn(2, 1, 1)))
    result = apply_rules(finish(b, weight), [FloatOffset()])

    assert (result.modified, list(result.misses)) == (False, [])
