from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    calls,
    finish,
    golden,
    refusal,
)
from torch import nn
from torch.fx import Node

import qfuse
from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.normalize.aten.qdq.choose_asymmetric import ChooseAsymmetric
from qfuse.normalize.aten.qdq.dequantize import DequantizeChain
from qfuse.normalize.aten.qdq.quantize import QuantizeChain
from qfuse.rewrite.driver import apply_rules
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder

K = 9
RULES = QuantizeChain(), DequantizeChain(), ChooseAsymmetric()


def source(  # noqa: PLR0913 - whatever may differ
    b: GraphBuilder,
    x: Node,
    *,
    of: Node | None = None,
    dims: Any = (-1,),
    keepdim: bool = True,
    least: float | None = 1e-5,
    top: float = 255,
    bounds: tuple[int, int] = (0, 255),
    zero: tuple[int, int] | None = None,
    start: int | None = None,
    includes: str = "clamp",
    negative: str = "ratio",
    first: bool = False,
    cast: torch.dtype | None = None,
    dtype: torch.dtype = torch.uint8,
) -> tuple[Node, Node, Node]:
    """Quantize ``x`` by hand; return codes, the dequantized values, and the scale."""
    data = x if of is None else of
    low = b.call(aten.amin.default, data, list(dims), keepdim)
    high = b.call(aten.amax.default, data, list(dims), keepdim)
    match includes:
        case "clamp":
            low = b.call(aten.clamp.default, low, None, 0)
            high = b.call(aten.clamp.default, high, 0)
        case "minimum":
            low = b.call(aten.minimum.default, low, b.call(aten.zeros_like.default, low))
            high = b.call(aten.maximum.default, high, b.call(aten.zeros_like.default, high))
        case _:
            pass
    scale = b.call(aten.div.Tensor, b.call(aten.sub.Tensor, high, low), top)
    if least is not None:
        scale = b.call(aten.clamp.default, scale, least)
    start = bounds[0] if start is None else start
    point = _point(b, low, scale, start, negative, first=first)
    point = b.call(aten.clamp.default, point, *(bounds if zero is None else zero))
    if cast is not None:
        point = b.call(aten._to_copy.default, point, dtype=cast)
    y = b.call(aten.round.default, b.call(aten.div.Tensor, x, scale))
    y = b.call(aten.clamp.default, b.call(aten.add.Tensor, y, point), *bounds)
    q = b.call(aten._to_copy.default, y, dtype=dtype)
    real = b.call(aten._to_copy.default, q, dtype=x.meta["val"].dtype)
    real = b.call(aten.mul.Tensor, b.call(aten.sub.Tensor, real, point), scale)
    return q, real, scale


def _point(
    b: GraphBuilder, low: Node, scale: Node, start: int, negative: str, *, first: bool
) -> Node:
    def turned(x: Node) -> Node:
        return b.call(aten.neg.default, x)

    if first:
        shifted = b.call(aten.rsub.Scalar, b.call(aten.div.Tensor, low, scale), start)
        return b.call(aten.round.default, shifted)
    match negative:
        case "low":
            point = b.call(aten.round.default, b.call(aten.div.Tensor, turned(low), scale))
        case "ratio":
            point = b.call(aten.round.default, turned(b.call(aten.div.Tensor, low, scale)))
        case "last":
            point = turned(b.call(aten.round.default, b.call(aten.div.Tensor, low, scale)))
        case _:
            point = b.call(aten.round.default, b.call(aten.div.Tensor, low, scale))
            return b.call(aten.rsub.Scalar, point, start)
    return b.call(aten.add.Tensor, point, start) if start else point


def program_of(dtype: torch.dtype = torch.float32, **changes: Any) -> CapturedGraph:
    b = GraphBuilder()
    return finish(b, *source(b, b.arg("x", dtype, 3, K), **changes))


def refused(program: CapturedGraph) -> tuple[MissCode, str]:
    assert apply_rules(program, [QuantizeChain()]).modified
    return refusal(program, ChooseAsymmetric())


def test_golden_rows_with_zero_in_the_interval() -> None:
    b = GraphBuilder()
    program = finish(b, *source(b, b.arg("x", torch.float32, "m", K)))

    assert_expected_inline(
        golden(program, *RULES),
        """\
%x: float32[s0, 9]
%0 = qfuse.choose_qparams(%x, 'ao-asymmetric uint8[0,255] 1x* eps=1e-05 float32 int32'): (float32[s0, 1], int32[s0, 1])
%1 = getitem(%0, 0): float32[s0, 1]
%2 = getitem(%0, 1): int32[s0, 1]
%3 = qfuse.quantize(%x, %1, %2, 'uint8[0,255] 1x* float32 float32:divide:round-zp int'): uint8[s0, 9]
%4 = qfuse.dequantize(%3, %1, %2, 'uint8[0,255] 1x* float32 float32:divide:round-zp int'): float32[s0, 9]
return (%3, %4, %1)
fired: quantize-chain 1, dequantize-chain 1, choose-asymmetric 1""",
    )


def test_golden_a_whole_tensor() -> None:
    b = GraphBuilder()
    changes: dict[str, Any] = {
        "dims": (),
        "keepdim": False,
        "bounds": (-128, 127),
        "dtype": torch.int8,
    }
    program = finish(b, *source(b, b.arg("x", torch.float32, "m", K), **changes))

    assert_expected_inline(
        golden(program, *RULES),
        """\
%x: float32[s0, 9]
%0 = qfuse.choose_qparams(%x, 'ao-asymmetric int8[-128,127] *x* eps=1e-05 float32 int32'): (float32[1, 1], int32[1, 1])
%1 = getitem(%0, 0): float32[1, 1]
%2 = getitem(%0, 1): int32[1, 1]
%3 = aten.view(%1, ()): float32[]
%4 = qfuse.quantize(%x, %1, %2, 'int8[-128,127] *x* float32 float32:divide:round-zp int'): int8[s0, 9]
%5 = aten.view(%2, ()): int32[]
%6 = aten.unsqueeze(%5, 0): int32[1]
%7 = aten.unsqueeze(%6, 0): int32[1, 1]
%8 = aten.unsqueeze(%3, 0): float32[1]
%9 = aten.unsqueeze(%8, 0): float32[1, 1]
%10 = qfuse.dequantize(%4, %9, %7, 'int8[-128,127] *x* float32 float32:divide:round-zp int'): float32[s0, 9]
return (%4, %10, %3)
fired: quantize-chain 1, dequantize-chain 1, choose-asymmetric 1""",
    )


INT8: dict[str, Any] = {"bounds": (-128, 127), "dtype": torch.int8}
FORMS: dict[str, dict[str, Any]] = {
    "ratio": {},
    "low": {"negative": "low"},
    "last": {"negative": "last"},
    "subtracted": {"negative": "rsub"},
    "minimum": {"includes": "minimum"},
    "cast": {"cast": torch.int32},
    "cast to storage": {"cast": torch.uint8},
    "whole": {"dims": (), "keepdim": False},
    "int8": INT8,
    "int8 subtracted": {**INT8, "negative": "rsub"},
    "int8 cast": {**INT8, "negative": "low", "cast": torch.int8},
    "four bits": {"bounds": (0, 15), "top": 15.0},
}


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("form", FORMS)
def test_bits_are_those_of_the_chain(form: str, dtype: torch.dtype) -> None:
    if form == "whole" and dtype is torch.bfloat16:
        dtype = torch.float32  # A scalar is not rounded to bfloat16, as a tensor is.
    b = GraphBuilder()
    program = finish(b, *source(b, b.arg("x", dtype, "b", 4, K), **FORMS[form]))
    x = torch.randn(3, 4, K).to(dtype)
    # Ties, and numbers of one sign.
    x[0] = (torch.randint(-300, 300, (4, K)) * 0.5).to(dtype)
    x[2, 1] = x[2, 1].abs()
    x[1, 0], x[1, 1], x[1, 2], x[1, 3] = 0.0, -0.0, -3.0, 5.0
    result = assert_same_values(program, [x], *RULES, exact=True)

    assert result.fired == {"quantize-chain": 1, "dequantize-chain": 1, "choose-asymmetric": 1}
    assert "aten.amin" not in calls(program)


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [{"includes": "no"}, {"first": True}, {**INT8, "includes": "no"}],
    ids=["without zero", "shifted first", "int8 without zero"],
)
def test_other_choices_are_quantized_with_a_computed_zero_point(
    changes: dict[str, Any], dtype: torch.dtype
) -> None:
    b = GraphBuilder()
    program = finish(b, *source(b, b.arg("x", dtype, "b", 4, K), **changes))
    x = torch.randn(3, 4, K).to(dtype) + 0.5
    result = assert_same_values(program, [x], *RULES, exact=True)

    assert result.fired == {"quantize-chain": 1, "dequantize-chain": 1}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"dtype": torch.float16}, MissCode.DTYPE),
        ({"top": 254}, MissCode.RANGE),
        ({"bounds": (0, 127), "zero": (0, 255)}, MissCode.RANGE),
        ({"zero": (0, 200)}, MissCode.ZERO_POINT),
        ({"start": 3}, MissCode.ZERO_POINT),
        ({"includes": "no"}, MissCode.PATTERN),
        ({"first": True}, MissCode.PATTERN),
        ({"dims": (0,)}, MissCode.PATTERN),
    ],
    ids=str,
)
def test_refuses_other_choices(changes: dict[str, Any], code: MissCode) -> None:
    real = changes.get("dtype", torch.float32)
    rest = {k: v for k, v in changes.items() if k != "dtype"}
    assert refused(program_of(real, **rest))[0] is code


@pytest.mark.parametrize("least", [None, 0.0])
def test_refuses_a_zero_point_that_may_be_nan(least: float | None) -> None:
    """A row of zeros has a scale of zero, and the source has NaN there."""
    b = GraphBuilder()
    program = finish(b, *source(b, b.arg("x", torch.float32, 3, K), least=least))
    x = torch.randn(3, K)
    x[1] = 0
    result = assert_same_values(program, [x], *RULES, exact=True)

    assert not result.fired


@pytest.mark.parametrize("form", ["no least", "int8 no least", "int8 product no least"])
def test_rows_of_zeros_keep_their_nan(form: str) -> None:
    model = _Asymmetric(form).eval()
    model.normed = False
    fast = qfuse.compile(
        model,
        (torch.randn(24, 64),),
        options={"backend": "eager"},
        check="site",
        target=Target.for_testing(),
    )
    x = torch.randn(24, 64)
    x[3] = 0
    new, old = fast(x), model(x)
    assert old[3].isnan().all() or "product" in form
    torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-3, equal_nan=True)


def test_refuses_parameters_of_other_data() -> None:
    b = GraphBuilder()
    x, other = b.arg("x", torch.float32, 3, K), b.arg("other", torch.float32, 3, K)
    program = finish(b, *source(b, x, of=other))

    assert refused(program)[0] is MissCode.GRANULARITY


def test_refuses_a_zero_point_that_may_exceed_int32() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, K)
    low, high = (b.call(op, x, [-1], True) for op in (aten.amin.default, aten.amax.default))
    scale = b.call(aten.div.Tensor, b.call(aten.sub.Tensor, high, low), 255)
    ratio = b.call(aten.div.Tensor, b.call(aten.neg.default, low), scale)
    point = b.call(aten.round.default, ratio)
    y = b.call(aten.round.default, b.call(aten.div.Tensor, x, scale))
    y = b.call(aten.clamp.default, b.call(aten.add.Tensor, y, point), 0, 255)
    program = finish(b, b.call(aten._to_copy.default, y, dtype=torch.uint8))

    assert refusal(program, QuantizeChain()) == (MissCode.NOT_CONSTANT, point.name)


class _Asymmetric(nn.Module):
    """A linear on activations that plain PyTorch quantizes asymmetrically."""

    w: torch.Tensor
    scale: torch.Tensor
    sums: torch.Tensor

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        w = torch.randint(-127, 128, (48, 64), dtype=torch.int8)
        self.register_buffer("w", w)
        self.register_buffer("scale", torch.rand(48) * 0.01 + 0.001)
        self.register_buffer("sums", w.sum(1, dtype=torch.int32))
        self.normed = True
        self.norm = nn.LayerNorm(64)

    def chosen(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if "tensor" in self.form:
            low, high = x.min(), x.max()
        elif "aminmax" in self.form:
            low, high = torch.aminmax(x, dim=-1, keepdim=True)
        elif "dim" in self.form:
            low, high = x.min(-1, keepdim=True)[0], x.max(-1, keepdim=True).values
        else:
            low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        if "without zero" not in self.form:
            low, high = low.clamp(max=0), high.clamp(min=0)
        scale = (high - low) / 255
        if "no least" not in self.form:
            scale = scale.clamp(min=1e-8)
        bottom = -128 if "int8" in self.form else 0
        zero = (bottom - torch.round(low / scale)).clamp(bottom, bottom + 255)
        return scale, zero

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x) if self.normed else x
        scale, zero = self.chosen(x)
        bounds = (-128, 127, torch.int8) if "int8" in self.form else (0, 255, torch.uint8)
        q = torch.clamp(torch.round(x / scale) + zero, *bounds[:2]).to(bounds[2])
        if "product" in self.form:
            y = torch._int_mm(q, self.w.t())
            if "integer" in self.form:
                y = (y - zero.to(torch.int32) * self.sums).float()
                return y * scale * self.scale
            return (y.float() - zero * self.sums) * (scale * self.scale)
        real = (q.float() - zero) * scale
        return F.linear(real, self.w.float() * self.scale[:, None])


@pytest.mark.numeric
@pytest.mark.own_kernels
@pytest.mark.parametrize("isa", ["avx512_vnni", "avx2"])
@pytest.mark.parametrize(
    "form",
    [
        *("rows", "int8 rows", "int8 dim", "aminmax", "tensor", "int8 tensor"),
        *("without zero", "int8 product", "int8 integer product"),
        *("int8 product without zero", "int8 integer product of tensor"),
    ],
)
def test_every_spelling_runs_on_the_int8_kernel(form: str, isa: str) -> None:
    model, x = _Asymmetric(form).eval(), torch.randn(24, 64)
    target = Target.for_testing(isa=isa)
    fast = qfuse.compile(model, (x,), options={"backend": "eager"}, check="site", target=target)

    fused = {event.kernel for event in fast.report.fused}
    assert fused - {"qfuse.layer_norm_quantized"} == {"qfuse.linear_w8a8"}
    assert fast.report.rolled_back == ()
    chosen = "without zero" not in form
    assert fast.report.fired["choose-asymmetric"] == chosen
    assert ("fuse-norm-quantize" in fast.report.fired) == chosen
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-3)
