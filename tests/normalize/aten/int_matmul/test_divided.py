from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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
from torch import nn
from torch.fx import Node

import qfuse
from qfuse.ir.events import Exactness, MissCode
from qfuse.normalize.aten.int_matmul.divided import Divided, DividedExactly
from qfuse.normalize.aten.int_matmul.scaled_product import FuseScaledProduct
from qfuse.normalize.aten.qdq.dequantize import DequantizeChain
from qfuse.normalize.aten.qdq.quantize import QuantizeChain
from qfuse.normalize.aten.views.drop_copy import DropCopy
from qfuse.rewrite.driver import apply_rules
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder

K, N = 12, 5


class Case:
    """A linear on a cast weight, or the weight alone, and what it is divided by."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.b = GraphBuilder()
        self.dtype = dtype
        self.q = self.b.const("w", codes(N, K))

    @property
    def weight(self) -> Node:
        return self.b.call(aten._to_copy.default, self.q, dtype=self.dtype)

    def linear(self, *bias: Node) -> Node:
        x = self.b.arg("x", self.dtype, 3, K)
        return self.b.call(aten.linear.default, x, self.weight, *bias)

    def int_mm(self) -> Node:
        """Add ``_int_mm`` of int8 rows."""
        x = self.b.arg("x", torch.int8, 3, K)
        return self.b.call(aten._int_mm.default, x, self.b.call(aten.t.default, self.q))

    def over(self, y: Node, by: Node | float) -> Node:
        return self.b.call(aten.div.Tensor, y, by)


def test_golden_a_linear_over_one_number_per_feature() -> None:
    c = Case()
    program = finish(c.b, c.over(c.linear(), c.b.const("s", scales(N))))

    assert_expected_inline(
        golden(program, DividedExactly(), Divided(), FuseScaledProduct()),
        """\
const %w: int8[5, 12]
%x: float32[3, 12]
const %s_inverse_scale: float32[5, 1]
%0 = qfuse.dequantize(%w, %s_inverse_scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[5, 12]
%1 = aten.linear(%x, %0): float32[3, 5]
return (%1)
fired: divided 1, fuse-scaled-product 1""",
    )


def test_golden_a_weight_over_powers_of_two() -> None:
    c = Case(torch.bfloat16)
    s = c.b.const("s", torch.tensor([0.5, 4, 8, 2, 1]).bfloat16().reshape(N, 1))
    program = finish(c.b, c.over(c.weight, s))

    assert_expected_inline(
        golden(program, DividedExactly(), Divided()),
        """\
const %w: int8[5, 12]
%0 = aten._to_copy(%w, dtype=bfloat16): bfloat16[5, 12]
const %s_inverse: bfloat16[5, 1]
%1 = aten.mul.Tensor(%0, %s_inverse): bfloat16[5, 12]
return (%1)
fired: divided-exactly 1""",
    )


@pytest.mark.parametrize("by", [0.0, math.inf, math.nan, 1e-42, 3e38])
@pytest.mark.parametrize("number", [True, False])
def test_refuses_divisors_without_an_inverse(by: float, number: bool) -> None:
    c = Case()
    y = c.over(c.linear(), by if number else c.b.const("s", torch.full((N,), by)))

    assert refusal(finish(c.b, y), Divided()) == (MissCode.RANGE, y.name)


def test_refuses_a_negative_divisor_of_a_weight() -> None:
    c = Case()
    y = c.over(c.weight, -3.0)

    assert refusal(finish(c.b, y), Divided()) == (MissCode.RANGE, y.name)


def test_refuses_to_call_a_quotient_exact() -> None:
    c = Case()
    y = c.over(c.linear(), 3.0)

    assert refusal(finish(c.b, y), DividedExactly()) == (MissCode.ARITHMETIC, y.name)


@pytest.mark.parametrize("shape", [(3, 1), (3, N), (2, 3, N)])
def test_refuses_divisors_that_are_no_scale_of_the_weight(shape: tuple[int, ...]) -> None:
    c = Case()
    s = c.b.const("s", scales(*shape))
    code = refusal(finish(c.b, c.over(c.linear(), s)), Divided())

    assert code == (MissCode.NOT_CONSTANT if shape == (3, 1) else MissCode.AXIS, "s")


@pytest.mark.parametrize("of", ["linear", "weight"])
def test_refuses_divisors_that_are_computed_at_run_time(of: str) -> None:
    c = Case()
    s = c.b.arg("s", torch.float32, 1)
    y = c.over(c.linear() if of == "linear" else c.weight, s)

    assert refusal(finish(c.b, y), Divided())[0] is MissCode.NOT_CONSTANT


def test_refuses_a_bias_that_is_computed_at_run_time() -> None:
    c = Case()
    y = c.over(c.linear(c.b.arg("bias", torch.float32, N)), 3.0)

    assert refusal(finish(c.b, y), Divided()) == (MissCode.NOT_CONSTANT, "bias")


def test_refuses_an_image_and_the_quotient_of_a_quantize() -> None:
    b = GraphBuilder()
    image = b.call(aten._to_copy.default, b.arg("x", torch.uint8, 2, 4), dtype=torch.float32)
    program = finish(b, b.call(aten.div.Tensor, image, 255.0))
    assert refusal(program, Divided()) == (MissCode.NOT_CONSTANT, "x")

    c = Case()
    y = c.over(c.linear(), 3.0)
    r = c.b.call(aten.round.default, c.b.call(aten.add.Tensor, y, 2))
    assert refusal(finish(c.b, r), Divided()) == (MissCode.PATTERN, y.name)


def test_refuses_a_product_with_other_users() -> None:
    c = Case()
    y = c.linear()
    program = finish(c.b, c.over(y, 3.0), y)

    assert refusal(program, Divided()) == (MissCode.SHARED, y.name)


DIVISORS: dict[str, Callable[[], torch.Tensor | float]] = {
    "number": lambda: 0.013,
    "integer": lambda: 3,
    "negative": lambda: -0.7,
    "per tensor": lambda: scales(1),
    "scalar": scales,
    "per feature": lambda: scales(N),
    "of full rank": lambda: scales(1, N),
    "float64 scalar": lambda: scales(dtype=torch.float64),
    "integers": lambda: torch.randint(1, 9, (N,)),
}


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", DIVISORS)
def test_a_linear_agrees(kind: str, dtype: torch.dtype) -> None:
    by = DIVISORS[kind]()
    if isinstance(by, torch.Tensor) and by.dtype is torch.float32:
        by = by.to(dtype)
    c = Case(dtype)
    y = c.over(c.linear(), c.b.const("s", by) if isinstance(by, torch.Tensor) else by)
    program = finish(c.b, y)
    rules = DividedExactly(), Divided(), FuseScaledProduct(), DropCopy()
    fired = assert_same_values(program, [(torch.randn(3, K) * 0.1).to(dtype)], *rules).fired

    assert fired["divided"] == fired["fuse-scaled-product"] == 1
    assert "aten.div.Tensor" not in calls(program)
    assert "aten.mul.Tensor" not in calls(program)


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [None, (), (1,), (N, 1), (1, K)])
def test_a_weight_agrees(shape: tuple[int, ...] | None, dtype: torch.dtype) -> None:
    c = Case(dtype)
    by = 37.0 if shape is None else c.b.const("s", (torch.rand(shape) * 100 + 20).to(dtype))
    program = finish(c.b, c.over(c.weight, by), c.b.arg("x", torch.float32, 1))
    rules = DividedExactly(), Divided(), DequantizeChain(), DropCopy()
    fired = assert_same_values(program, [torch.ones(1)], *rules).fired

    assert fired["divided"] == fired["dequantize-chain"] == 1


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by", [4.0, 0.0625, "per feature"])
def test_powers_of_two_have_the_same_bits(by: float | str, dtype: torch.dtype) -> None:
    c = Case(dtype)
    powers = torch.tensor([0.25, 2, 8, 1, 0.5]).to(dtype)
    other = by if isinstance(by, float) else c.b.const("s", powers)
    program = finish(c.b, c.over(c.linear(), other))
    x = (torch.randn(3, K) * 0.1).to(dtype)

    fired = assert_same_values(program, [x], DividedExactly(), exact=True).fired
    assert fired == {"divided-exactly": 1}
    assert DividedExactly.exactness is Exactness.EXACT


@pytest.mark.numeric
@pytest.mark.parametrize("kind", ["rows", "tensor", "number", "features"])
def test_a_product_of_integers_agrees(kind: str) -> None:
    c = Case()
    by: Node | float
    match kind:
        case "rows":
            by = c.b.arg("s", torch.float32, 3, 1)
        case "tensor":
            by = c.b.arg("s", torch.float32, 1)
        case "number":
            by = 3.7
        case _:
            by = c.b.const("s", scales(N) * 100)
    program = finish(c.b, c.over(c.int_mm(), by))
    more = [torch.rand(3 if kind == "rows" else 1, 1) + 1] if isinstance(by, Node) else []
    more = [m if kind == "rows" else m[0] for m in more] if kind != "features" else []
    inputs = [codes(3, K), *more]
    order = [n.name for n in program.graph.nodes if n.op == "placeholder"]
    inputs = inputs if order[0] == "x" else inputs[::-1]
    rules = DividedExactly(), Divided(), FuseScaledProduct()
    fired = assert_same_values(program, inputs, *rules).fired

    assert fired == {"divided": 1, "fuse-scaled-product": 1}


def test_a_divisor_of_quantized_activations_is_read() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, K)
    q = b.call(aten.round.default, b.call(aten.mul.Tensor, x, 20.0))
    q = b.call(aten.clamp.default, q, -128, 127)
    q = b.call(aten._to_copy.default, q, dtype=torch.int8)
    real = b.call(aten._to_copy.default, q, dtype=torch.float32)
    program = finish(b, b.call(aten.div.Tensor, real, 20.0))
    fired = apply_rules(program, [QuantizeChain(), Divided(), DequantizeChain()]).fired

    assert fired["dequantize-chain"] == fired["divided"]


class _Divided(nn.Module):
    """A linear of a quantized weight with a divisor in one place."""

    w: torch.Tensor
    steps: torch.Tensor

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.register_buffer("w", torch.randint(-127, 128, (48, 64), dtype=torch.int8))
        self.register_buffer("steps", torch.rand(48) * 100 + 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        match self.form:
            case "product":
                return F.linear(x, self.w.to(x.dtype)) / self.steps.to(x.dtype)
            case "number":
                return F.linear(x, self.w.to(x.dtype)) / 127.0
            case "weight":
                return F.linear(x, self.w.to(x.dtype) / self.steps.to(x.dtype)[:, None])
            case _:
                pass
        s = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
        q = torch.clamp(torch.round(x.float() / s), -128, 127).to(torch.int8)
        y = torch._int_mm(q, self.w.t())
        if self.form == "integers":
            return (y.float() * s / self.steps).to(x.dtype)
        inverse = 127 / x.float().abs().amax(-1, keepdim=True).clamp(min=1e-5)
        q = (x.float() * inverse).round().clamp(-128, 127).to(torch.int8)
        return (torch._int_mm(q, self.w.t()) / inverse / 90.0).to(x.dtype)


@pytest.mark.numeric
@pytest.mark.own_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["product", "number", "weight", "integers", "inverse scale"])
def test_every_spelling_runs_on_a_quantized_kernel(form: str, dtype: torch.dtype) -> None:
    model, x = _Divided(form).eval(), torch.randn(24, 64, dtype=dtype)
    target = Target.for_testing(isa="avx512_vnni")
    fast = qfuse.compile(model, (x,), options={"backend": "eager"}, check="site", target=target)

    kernel = (
        "qfuse.linear_w8a16" if form in {"product", "number", "weight"} else "qfuse.linear_w8a8"
    )
    assert [event.kernel for event in fast.report.fused] == [kernel]
    assert fast.report.rolled_back == ()
    loose = dtype is torch.bfloat16
    tolerance: dict[str, Any] = (
        {"rtol": 2e-2, "atol": 2e-2} if loose else {"rtol": 1e-4, "atol": 1e-4}
    )
    torch.testing.assert_close(fast(x), model(x), **tolerance)
