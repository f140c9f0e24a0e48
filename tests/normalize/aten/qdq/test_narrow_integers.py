from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import assert_same_values, aten, finish, golden, refusal
from torch import nn
from torch.fx import Node

import qfuse
from qfuse.ir.events import MissCode
from qfuse.normalize.aten.qdq.narrow_integers import NarrowIntegers
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder


def product(b: GraphBuilder, w: Node, dtype: torch.dtype = torch.float32) -> Node:
    real = b.call(aten._to_copy.default, w, dtype=dtype)
    return b.call(aten.linear.default, b.arg("x", dtype, 3, 4), real)


def test_golden_int64_becomes_int8() -> None:
    b = GraphBuilder()
    w = b.const("w", torch.tensor([[-128, 3, 0, 1], [127, 5, 6, 7]]))
    assert_expected_inline(
        golden(finish(b, product(b, w)), NarrowIntegers()),
        """\
const %w_narrow: int8[2, 4]
%0 = aten._to_copy(%w_narrow, dtype=float32): float32[2, 4]
%x: float32[3, 4]
%1 = aten.linear(%x, %0): float32[3, 2]
return (%1)
fired: narrow-integers 1""",
    )


@pytest.mark.parametrize("values", [[-129, 0], [256, 1], [-1, 128]])
def test_refuses_values_beyond_8_bits(values: list[int]) -> None:
    b = GraphBuilder()
    program = finish(b, product(b, b.const("w", torch.tensor([values * 2]))))
    assert refusal(program, NarrowIntegers()) == (MissCode.RANGE, "w")


def test_refuses_integers_with_other_users() -> None:
    b = GraphBuilder()
    w = b.const("w", torch.ones(2, 4, dtype=torch.int64))
    program = finish(b, product(b, w), b.call(aten.neg.default, w))
    assert refusal(program, NarrowIntegers()) == (MissCode.SHARED, "w")


def test_golden_a_product_with_floats_casts_by_itself() -> None:
    b = GraphBuilder()
    w = b.const("w", torch.tensor([[-128, 3, 0, 1], [127, 5, 6, 7]]))
    real = b.call(aten.mul.Tensor, b.const("s", torch.rand(2, 1)), w)
    y = b.call(aten.linear.default, b.arg("x", torch.float32, 3, 4), real)
    assert_expected_inline(
        golden(finish(b, y), NarrowIntegers()),
        """const %s: float32[2, 1]
const %w_narrow: int8[2, 4]
%0 = aten._to_copy(%w_narrow, dtype=float32): float32[2, 4]
%1 = aten.mul.Tensor(%0, %s): float32[2, 4]
%x: float32[3, 4]
%2 = aten.linear(%x, %1): float32[3, 2]
return (%2)
fired: narrow-integers 1""",
    )


def test_refuses_a_product_of_integers() -> None:
    b = GraphBuilder()
    w = b.const("w", torch.tensor([[-128, 3, 0, 1], [127, 5, 6, 7]]))
    program = finish(b, b.call(aten.mul.Tensor, b.arg("x", torch.int64, 2, 4), w))
    assert refusal(program, NarrowIntegers())[0] is MissCode.DTYPE


@pytest.mark.numeric
@pytest.mark.parametrize("number", [0.5, 3.0])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int64, torch.bool])
def test_products_have_the_same_bits(dtype: torch.dtype, number: float) -> None:
    for factor in (number, torch.rand(2, 1), torch.rand(4, dtype=torch.float64).bfloat16()):
        b = GraphBuilder()
        w = b.const("w", torch.tensor([[0, 255, 1, 0], [3, 0, 9, 200]]).to(dtype))
        other = b.const("s", factor) if isinstance(factor, torch.Tensor) else factor
        real = b.call(aten.mul.Tensor, w, other)
        y = b.call(aten.add.Tensor, b.arg("x", real.meta["val"].dtype, 2, 4), real)
        x = torch.randn(2, 4).to(real.meta["val"].dtype)
        fired = assert_same_values(finish(b, y), [x], NarrowIntegers(), exact=True).fired
        assert fired == {"narrow-integers": 1}


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64, torch.bool])
@pytest.mark.parametrize("real", [torch.float32, torch.bfloat16])
def test_values_are_the_same_bits(dtype: torch.dtype, real: torch.dtype) -> None:
    b = GraphBuilder()
    w = torch.tensor([[0, 255, 1, 0], [3, 0, 9, 200]]).to(dtype)
    program = finish(b, product(b, b.const("w", w), real))
    x = torch.randn(3, 4).to(real)
    fired = assert_same_values(program, [x], NarrowIntegers(), exact=True).fired
    assert fired == {"narrow-integers": 1}


class _Weight(nn.Module):
    """A linear whose quantized weight is held or packed in one way."""

    q: torch.Tensor
    scale: torch.Tensor
    shifts: torch.Tensor

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        w = torch.randn(48, 64)
        top = 127 if form.startswith("int") else 7
        scale = w.abs().amax(1, keepdim=True) / top
        q = torch.round(w / scale).to(torch.int32)
        self.register_buffer("scale", scale)
        self.register_buffer("shifts", torch.arange(0, 32, 4, dtype=torch.int32))
        self.register_buffer("q", self._stored(q))

    def _stored(self, q: torch.Tensor) -> torch.Tensor:
        u = q + 8 if "offset" in self.form else q & 15
        match self.form.split()[0]:
            case "low":
                return (u[:, ::2] | u[:, 1::2] << 4).to(torch.uint8)
            case "high":
                return (u[:, 1::2] | u[:, ::2] << 4).to(torch.uint8)
            case "halves":
                return (u[:, :32] | u[:, 32:] << 4).to(torch.uint8)
            case "words":
                return (u.reshape(48, 8, 8) << self.shifts).sum(-1).to(torch.int32)
            case _:
                return q.to(getattr(torch, self.form))

    def weight(self) -> torch.Tensor:
        low, high = self.q & 15, self.q >> 4
        match self.form:
            case "low offset":
                return torch.stack([low, high], -1).reshape(48, 64).to(torch.int8) - 8
            case "high offset":
                return torch.stack([high, low], -1).flatten(-2).float() - 8.0
            case "low signed":
                q = self.q.view(torch.int8)
                return torch.stack([(q << 4) >> 4, q >> 4], -1).view(48, 64)
            case "halves offset":
                return torch.cat([low.int(), high.int()], 1) - 8
            case "words offset":
                return ((self.q[:, :, None] >> self.shifts) & 15).reshape(48, 64) - 8
            case _:
                return self.q

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight().to(torch.float32) * self.scale)


@pytest.mark.numeric
@pytest.mark.own_kernels
@pytest.mark.parametrize(
    "form",
    [
        *("int16", "int32", "int64", "low offset", "high offset", "low signed"),
        *("halves offset", "words offset"),
    ],
)
def test_the_weight_is_read_as_it_is_stored(form: str) -> None:
    model, x = _Weight(form).eval(), torch.randn(5, 64)
    fast = qfuse.compile(
        model, (x,), options={"backend": "eager"}, check="site", target=Target.for_testing()
    )
    bits = 8 if form.startswith("int") else 4
    assert [event.kernel for event in fast.report.fused] == [f"qfuse.linear_w{bits}a16"]
    assert fast.report.rolled_back == ()
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)


def test_integers_times_a_size_are_left() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "m", 4)
    size = b.call(aten.sym_size.int, x, 0)
    program = finish(b, b.call(aten.mul.Tensor, x, size))
    assert refusal(program, NarrowIntegers()) == (MissCode.PATTERN, "x")
