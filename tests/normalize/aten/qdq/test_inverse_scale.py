from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import assert_same_values, aten, finish, golden, refusal
from torch import nn
from torch.fx import Node

import qfuse
from qfuse.ir.events import MissCode
from qfuse.normalize.aten.qdq.inverse_scale import InverseScale
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder


def inverse(b: GraphBuilder, x: Node, top: float = 127.0) -> Node:
    peak = b.call(aten.amax.default, b.call(aten.abs.default, x), [-1], True)
    return b.call(aten.mul.Tensor, b.call(aten.reciprocal.default, peak), top)


def test_golden_all_users_take_the_scale() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "n", 8)
    factor = inverse(b, x)
    q = b.call(aten.round.default, b.call(aten.mul.Tensor, factor, x))
    back = b.call(aten.div.Tensor, q, factor)
    scale = b.call(aten.mul.Tensor, b.call(aten.reciprocal.default, factor), 1)
    again = b.call(aten.mul.Tensor, q, scale)
    assert_expected_inline(
        golden(finish(b, back, again), InverseScale()),
        """\
%x: float32[s0, 8]
%0 = aten.abs(%x): float32[s0, 8]
%1 = aten.amax(%0, (-1), True): float32[s0, 1]
%2 = aten.div.Tensor(%1, 127.0): float32[s0, 1]
%3 = aten.div.Tensor(%x, %2): float32[s0, 8]
%4 = aten.round(%3): float32[s0, 8]
%5 = aten.mul.Tensor(%4, %2): float32[s0, 8]
%6 = aten.mul.Tensor(%4, %2): float32[s0, 8]
return (%5, %6)
fired: inverse-scale 1""",
    )


def test_a_factor_that_the_graph_returns_stays() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, 8)
    factor = inverse(b, x)
    q = b.call(aten.round.default, b.call(aten.mul.Tensor, x, factor))
    result = assert_same_values(finish(b, q, factor), [torch.randn(3, 8)], InverseScale())
    assert result.fired == {"inverse-scale": 1}


def test_refuses_a_factor_whose_product_is_not_rounded() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, 8)
    factor = inverse(b, x)
    program = finish(b, b.call(aten.mul.Tensor, x, factor))
    assert refusal(program, InverseScale())[0] is MissCode.PATTERN


def test_refuses_a_negative_number_and_a_constant() -> None:
    for top, constant, code in ((-127.0, False, MissCode.ARGUMENT), (7.0, True, MissCode.PATTERN)):
        b = GraphBuilder()
        x = b.arg("x", torch.float32, 3, 8)
        of = b.const("c", torch.rand(3, 8)) if constant else x
        y = b.call(aten.round.default, b.call(aten.mul.Tensor, x, inverse(b, of, top)))
        rule = InverseScale()
        program = finish(b, y)
        found = [rule.match(n) for n in program.graph.nodes if n.target in rule.anchors]
        assert code in {miss.code for miss in found}  # type: ignore[union-attr]
        refusal(program, rule)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_refuses_sixteen_bits(dtype: torch.dtype) -> None:
    """In float16 `127 / 1e-3` is infinite, and quantizes every value to 127."""
    b = GraphBuilder()
    x = b.arg("x", dtype, 3, 8)
    y = b.call(aten.round.default, b.call(aten.mul.Tensor, x, inverse(b, x)))
    assert refusal(finish(b, y), InverseScale())[0] is MissCode.DTYPE


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_agree_up_to_rounding(dtype: torch.dtype) -> None:
    b = GraphBuilder()
    x = b.arg("x", dtype, "n", 8)
    factor = inverse(b, x)
    scaled = b.call(aten.mul.Tensor, x, factor)
    y = b.call(aten.clamp.default, b.call(aten.round.default, scaled), -127, 127)
    # A sum far from ties of the rounding, which the two forms may round differently.
    program = finish(b, b.call(aten.div.Tensor, b.call(aten.relu.default, y), factor))
    values = torch.randint(1, 64, (5, 8)).mul(2).to(dtype)
    values[:, 0] = 127
    assert assert_same_values(program, [values], InverseScale()).fired == {"inverse-scale": 1}


class _Dynamic(nn.Module):
    """Dynamic quantization with its scale in one public form."""

    w: torch.Tensor
    scale: torch.Tensor

    def __init__(self, form: str) -> None:
        super().__init__()
        self.register_buffer("w", torch.randint(-127, 128, (48, 64), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(48, 1) * 0.01)
        self.form = form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        peak = x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
        inverse = 127 / peak
        scaled = x * 127 / peak if self.form == "product first" else x * inverse
        q = torch.round(scaled).clamp(-127, 127).to(torch.int8)
        match self.form:
            case "reciprocal":
                real = q.float() * (1 / inverse)
            case "quotient":
                real = q.float() / inverse
            case _:
                real = q.float() * (peak / 127)
        return nn.functional.linear(real, self.w.float() * self.scale)


@pytest.mark.numeric
@pytest.mark.own_kernels
@pytest.mark.parametrize("form", ["reciprocal", "quotient", "both", "product first"])
def test_dynamic_quantization_reaches_the_int8_kernel(form: str) -> None:
    model, x = _Dynamic(form).eval(), torch.randn(24, 64)
    fast = qfuse.compile(
        model, (x,), options={"backend": "eager"}, check="site", target=Target.for_testing()
    )
    assert [event.kernel for event in fast.report.fused] == ["qfuse.linear_w8a8"]
    assert fast.report.rolled_back == ()
    assert fast.report.fired["choose-chain"] == 1
    # A tie may be rounded the other way: one step of one activation.
    step = float(x.abs().amax() / 127 * (model.w.float() * model.scale).abs().amax())
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=2 * step)
