from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import assert_same_values, aten, finish, golden, refusal
from torch import nn
from torch.fx import Node

import qfuse
from qfuse.ir.events import MissCode
from qfuse.normalize.aten.qdq.dequantize import DequantizeChain
from qfuse.normalize.aten.qdq.fold_integers import FoldIntegers
from qfuse.normalize.aten.qdq.narrow_integers import NarrowIntegers
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder

RULES = NarrowIntegers(), DequantizeChain(), FoldIntegers()
BITS = torch.tensor([[1, 0, 1, 1], [0, 0, 1, 0]])


def doubled(b: GraphBuilder, dtype: torch.dtype, factor: float = 2.0) -> Node:
    bits = b.call(aten._to_copy.default, b.const("bits", BITS.to(dtype)), dtype=torch.float32)
    return b.call(aten.mul.Tensor, bits, factor)


def used(b: GraphBuilder, w: Node) -> Node:
    return b.call(aten.linear.default, b.arg("x", torch.float32, 3, 4), w)


def test_golden_bits_that_mean_signs() -> None:
    b = GraphBuilder()
    program = finish(b, used(b, b.call(aten.sub.Tensor, doubled(b, torch.uint8), 1)))
    assert_expected_inline(
        golden(program, *RULES),
        """\
const %bits_integers: int8[2, 4]
%0 = aten._to_copy(%bits_integers, dtype=float32): float32[2, 4]
%x: float32[3, 4]
%1 = aten.linear(%x, %0): float32[3, 2]
return (%1)
fired: dequantize-chain 1, fold-integers 1""",
    )


@pytest.mark.parametrize("shift", [0.5, 127.0])
def test_refuses_fractions_and_large_integers(shift: float) -> None:
    b = GraphBuilder()
    y = b.call(
        aten.sub.Tensor, doubled(b, torch.uint8, -2.0 if shift > 1 else 2.0), 2 * shift - 0.5
    )
    program = finish(b, used(b, y))
    golden(program, *RULES[:2])
    assert refusal(program, FoldIntegers())[0] in {MissCode.RANGE, MissCode.PATTERN}

    b = GraphBuilder()
    y = b.call(aten.sub.Tensor, doubled(b, torch.uint8, 500.0), shift)
    program = finish(b, used(b, y))
    golden(program, *RULES[:2])
    assert refusal(program, FoldIntegers()) == (MissCode.RANGE, y.name)


def test_refuses_a_negative_zero() -> None:
    b = GraphBuilder()
    w = b.call(aten.where.Scalar, b.const("bits", BITS.bool()), 1.0, -0.0)
    program = finish(b, used(b, w))
    assert refusal(program, FoldIntegers()) == (MissCode.RANGE, w.name)


def test_refuses_a_difference_with_a_zero_point() -> None:
    b = GraphBuilder()
    real = b.call(aten._to_copy.default, b.const("q", BITS.to(torch.int8)), dtype=torch.float32)
    y = b.call(aten.sub.Tensor, real, 8.0)
    assert refusal(finish(b, used(b, y)), FoldIntegers()) == (MissCode.PATTERN, y.name)


def test_refuses_bits_that_are_computed_at_run_time() -> None:
    b = GraphBuilder()
    w = b.call(aten.where.Scalar, b.arg("bits", torch.bool, 2, 4), 1.0, -1.0)
    assert refusal(finish(b, used(b, w)), FoldIntegers()) == (MissCode.PATTERN, w.name)


FORMS: dict[str, Callable[[GraphBuilder, torch.dtype], Node]] = {
    "sub": lambda b, d: b.call(aten.sub.Tensor, doubled(b, d), 1),
    "add": lambda b, d: b.call(aten.add.Tensor, doubled(b, d), -1.0),
    "rsub": lambda b, d: b.call(aten.rsub.Scalar, doubled(b, d), 1),
    "alpha": lambda b, d: b.call(aten.sub.Tensor, doubled(b, d), 0.5, alpha=2),
    "where": lambda b, _: b.call(aten.where.Scalar, b.const("bits", BITS.bool()), 1.0, -1.0),
    "tensors": lambda b, _: b.call(
        aten.where.self,
        b.const("bits", BITS.bool()),
        b.const("one", torch.tensor(1.0)),
        b.const("minus", torch.tensor(-1.0)),
    ),
}


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64])
@pytest.mark.parametrize("form", FORMS)
def test_bits_are_the_same(form: str, dtype: torch.dtype) -> None:
    b = GraphBuilder()
    w = FORMS[form](b, dtype)
    program = finish(b, b.call(aten.add.Tensor, w, b.arg("x", torch.float32, 2, 4)))
    fired = assert_same_values(program, [torch.randn(2, 4)], *RULES, exact=True).fired
    assert fired["fold-integers"] == 1


class _Narrow(nn.Module):
    """A linear with a weight of one or two bits, held in one way."""

    bits: torch.Tensor
    ternary: torch.Tensor
    packed: torch.Tensor
    shifts: torch.Tensor
    scale: torch.Tensor

    def __init__(self, form: str) -> None:
        super().__init__()
        n, k = 48, 64
        bits, ternary = torch.randint(0, 2, (n, k)), torch.randint(-1, 2, (n, k))
        shifts = torch.arange(0, 8, 2)
        self.form = form
        self.register_buffer("bits", bits.to(torch.bool if "bool" in form else torch.uint8))
        self.register_buffer("ternary", ternary.to(torch.int8))
        packed = ((ternary + 1).reshape(n, k // 4, 4) << shifts).sum(-1)
        self.register_buffer("packed", packed.to(torch.uint8))
        self.register_buffer("shifts", shifts.to(torch.uint8))
        self.register_buffer("scale", torch.rand(n, 1) * 0.02 + 0.01)

    def unpacked(self) -> torch.Tensor:
        return ((self.packed[:, :, None] >> self.shifts) & 3).reshape(48, 64)

    def weight(self, dtype: torch.dtype) -> torch.Tensor:  # noqa: PLR0911
        scale = self.scale.to(dtype)
        match self.form:
            case "bool" | "uint8":
                return (self.bits.to(dtype) * 2 - 1) * scale
            case "uint8 in int8":
                return (2 * self.bits.to(torch.int8) - 1).to(dtype) * scale
            case "bool where":
                return torch.where(self.bits, 1.0, -1.0).to(dtype) * scale
            case "ternary":
                return self.ternary.to(dtype) * scale[0]
            case "ternary over a scale":
                return self.ternary.to(dtype) / scale[0]
            case "two bits":
                return (self.unpacked().to(dtype) - 1) * scale
            case "two bits in int8":
                return (self.unpacked().to(torch.int8) - 1).to(dtype) * scale
            case _:
                return self.unpacked().to(torch.int8).sub(1).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "activations" not in self.form:
            return F.linear(x, self.weight(x.dtype))
        inverse = 127 / x.abs().max(dim=-1, keepdim=True).values.clamp(min=1e-5)
        q = (x * inverse).round().clamp(-128, 127).to(torch.int8)
        return F.linear(q.to(x.dtype), self.weight(x.dtype)) / (inverse * self.scale[0])


@pytest.mark.numeric
@pytest.mark.own_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "form",
    [
        *("bool", "uint8", "uint8 in int8", "bool where", "ternary", "ternary over a scale"),
        *("two bits", "two bits in int8", "bare"),
    ],
)
def test_every_spelling_runs_on_a_four_bit_kernel(form: str, dtype: torch.dtype) -> None:
    model, x = _Narrow(form).eval(), torch.randn(5, 64, dtype=dtype)
    target = Target.for_testing(isa="avx512_vnni")
    fast = qfuse.compile(model, (x,), options={"backend": "eager"}, check="site", target=target)

    assert [event.kernel for event in fast.report.fused] == ["qfuse.linear_w4a16"]
    assert fast.report.rolled_back == ()
    loose = dtype is torch.bfloat16
    tolerance: dict[str, Any] = (
        {"rtol": 3e-2, "atol": 1e-2}
        if loose
        else {"rtol": 1e-4, "atol": 1e-6 * float(model(x).abs().max())}
    )
    torch.testing.assert_close(fast(x), model(x), **tolerance)


@pytest.mark.numeric
@pytest.mark.own_kernels
def test_ternary_weights_with_quantized_activations_run_on_an_int8_kernel() -> None:
    model, x = _Narrow("activations of two bits").eval(), torch.randn(5, 64)
    target = Target.for_testing(isa="avx512_vnni")
    fast = qfuse.compile(model, (x,), options={"backend": "eager"}, check="site", target=target)

    assert [event.kernel for event in fast.report.fused] == ["qfuse.linear_w4a8"]
    assert fast.report.rolled_back == ()
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-3)
