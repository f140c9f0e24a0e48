from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import assert_same_values, aten, finish, golden, refusal
from torch import nn
from torch.fx import Node

import qfuse
from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.normalize.aten.int_matmul.in_float import FuseIntProduct
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder


def product(b: GraphBuilder, k: int, dtype: torch.dtype = torch.int8) -> Node:
    w = b.const("w", torch.full((k, 6), -128, dtype=torch.int8))
    left, right = (
        b.call(aten._to_copy.default, n, dtype=torch.int32) for n in (b.arg("x", dtype, "n", k), w)
    )
    return b.call(aten.mm.default, left, right)


def test_golden_a_linear_on_both_dequantized() -> None:
    b = GraphBuilder()
    assert_expected_inline(
        golden(finish(b, product(b, 8)), FuseIntProduct()),
        """\
%x: int8[s0, 8]
const %one_of_rank_2: float32[1, 1]
%0 = qfuse.dequantize(%x, %one_of_rank_2, None, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): float32[s0, 8]
const %w_t: int8[6, 8]
const %one_of_rank_2: float32[1, 1]
%1 = qfuse.dequantize(%w_t, %one_of_rank_2, None, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): float32[6, 8]
%2 = aten.linear(%0, %1): float32[s0, 6]
%3 = aten._to_copy(%2, dtype=int32): int32[s0, 6]
return (%3)
fired: fuse-int-product 1""",
    )


@pytest.mark.parametrize(("k", "dtype"), [(1025, torch.int8), (515, torch.uint8)])
def test_refuses_sums_that_float32_rounds(k: int, dtype: torch.dtype) -> None:
    b = GraphBuilder()
    y = product(b, k, dtype)
    assert refusal(finish(b, y), FuseIntProduct()) == (MissCode.RANGE, y.name)


def shifted(zero: int | torch.Tensor, k: int, dtype: torch.dtype = torch.int8) -> CapturedGraph:
    """Return a product from whose activation a zero point is subtracted."""
    b = GraphBuilder()
    x = b.call(aten._to_copy.default, b.arg("x", dtype, 3, k), dtype=torch.int32)
    w = b.const("w", torch.full((k, 6), -128, dtype=torch.int8))
    right = b.call(aten._to_copy.default, w, dtype=torch.int32)
    by = b.const("z", zero) if isinstance(zero, torch.Tensor) else zero
    return finish(b, b.call(aten.mm.default, b.call(aten.sub.Tensor, x, by), right))


@pytest.mark.parametrize("zero", [300, -129, torch.ones(3, 1, dtype=torch.int32)], ids=str)
def test_refuses_other_zero_points(zero: int | torch.Tensor) -> None:
    assert refusal(shifted(zero, 8), FuseIntProduct()) == (MissCode.ZERO_POINT, "mm_default")


def test_a_zero_point_lowers_the_number_of_exact_terms() -> None:
    assert refusal(shifted(127, 515), FuseIntProduct()) == (MissCode.RANGE, "mm_default")


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("zero", "k", "dtype"), [(9, 64, torch.int8), (127, 514, torch.int8), (128, 1024, torch.uint8)]
)
def test_a_known_zero_point_is_that_of_the_dequantize(
    zero: int, k: int, dtype: torch.dtype
) -> None:
    for by in (zero, torch.tensor(zero, dtype=torch.int32)):
        x = torch.full((3, k), torch.iinfo(dtype).min, dtype=dtype)
        x[1:, ::3] = 77
        fired = assert_same_values(shifted(by, k, dtype), [x], FuseIntProduct(), exact=True).fired
        assert fired == {"fuse-int-product": 1}


@pytest.mark.numeric
@pytest.mark.parametrize(("k", "dtype"), [(1, torch.int8), (1024, torch.int8), (514, torch.uint8)])
def test_largest_sums_are_exact(k: int, dtype: torch.dtype) -> None:
    b = GraphBuilder()
    x = torch.full((3, k), torch.iinfo(dtype).min or 255, dtype=dtype)
    x[1:, ::3] = 77
    program = finish(b, product(b, k, dtype))
    fired = assert_same_values(program, [x], FuseIntProduct(), exact=True).fired
    assert fired == {"fuse-int-product": 1}


class _IntMm(nn.Module):
    """One public way to write a product of quantized values and its scales."""

    w: torch.Tensor
    scale: torch.Tensor
    shifted: torch.Tensor

    def __init__(self, form: str) -> None:
        super().__init__()
        w = torch.randint(-127, 128, (48, 64), dtype=torch.int8)
        self.register_buffer("w", w)
        self.register_buffer("scale", torch.rand(48) * 0.01 + 0.001)
        self.register_buffer("shifted", 128 * w.sum(1, dtype=torch.int32))
        self.form = form

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: PLR0911
        s = x.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
        q = torch.clamp(torch.round(x / s), -128, 127).to(torch.int8)
        if self.form.startswith("uint8"):
            u = (q.to(torch.int16) + 128).to(torch.uint8)
            sums = u.to(torch.int32) @ self.w.t().to(torch.int32)
            minus = self.form == "uint8 subtracted"
            sums = sums - self.shifted if minus else sums + -self.shifted
            return sums.float() * s * self.scale
        if self.form.startswith("swapped"):
            sums = torch._int_mm(self.w, q.t())
            y = sums * self.scale[:, None] * s.t()
            return y.t() if self.form == "swapped" else y
        sums = torch._int_mm(q, self.w.t())
        match self.form:
            case "bare":
                return sums
            case "expanded rows":
                return sums * s.expand(sums.shape) * self.scale
            case "expanded both":
                return sums.float() * s.expand(sums.shape) * self.scale.expand(sums.shape)
            case "product of expanded":
                return sums * (s.expand(sums.shape) * self.scale)
            case "columns":
                return ((sums * s).t() * self.scale[:, None]).t()
            case "weight first":
                return (self.scale * sums) * s
            case _:
                return sums * ((s * 0.5) * self.scale)


@pytest.mark.numeric
@pytest.mark.own_kernels
@pytest.mark.parametrize("isa", ["avx512_vnni", "avx2"])
@pytest.mark.parametrize(
    "form",
    [
        *("bare", "expanded rows", "expanded both", "product of expanded", "columns"),
        *("weight first", "scales first", "swapped", "swapped and kept"),
        *("uint8 subtracted", "uint8 added"),
    ],
)
def test_every_spelling_runs_on_the_int8_kernel(form: str, isa: str) -> None:
    model, x = _IntMm(form).eval(), torch.randn(24, 64)
    target = Target.for_testing(isa=isa)
    fast = qfuse.compile(model, (x,), options={"backend": "eager"}, check="site", target=target)
    assert [event.kernel for event in fast.report.fused] == ["qfuse.linear_w8a8"]
    assert fast.report.rolled_back == ()
    mine, theirs = fast(x), model(x)
    if form == "bare":
        assert torch.equal(mine, theirs)
        # The cast to integers is the result, and no epilogue that was missed.
        assert "fuse-cast" not in {miss.rule for miss in fast.report.closest_misses}
    else:
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)
    assert mine.stride() == theirs.stride()


class _Shifted(nn.Module):
    """A product of integers, corrected by a zero point that the caller gives."""

    w: torch.Tensor
    scale: torch.Tensor
    sums: torch.Tensor

    def __init__(self, form: str) -> None:
        super().__init__()
        w = torch.randint(-127, 128, (48, 64), dtype=torch.int8)
        self.register_buffer("w", w)
        self.register_buffer("scale", torch.rand(48) * 0.01 + 0.001)
        self.register_buffer("sums", w.sum(1, dtype=torch.int32))
        self.form = form

    def forward(self, q: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        y = torch._int_mm(q, self.w.t())
        match self.form:
            case "integers":
                return y - zero * self.sums
            case "scaled integers":
                return (y - zero * self.sums).float() * self.scale
            case _:
                return y.float() * self.scale - zero.float() * self.sums.float() * self.scale


@pytest.mark.numeric
@pytest.mark.own_kernels
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("form", ["integers", "scaled integers", "floats"])
def test_a_zero_point_outside_of_int8_keeps_the_int8_kernel(form: str, large: bool) -> None:
    model = _Shifted(form).eval()
    q = torch.randint(-128, 128, (24, 64), dtype=torch.int8)
    # The product with the sums wraps if it is large.
    zero = torch.randint(-(2**31), 2**31, (24, 1)) if large else torch.randint(-300, 300, (24, 1))
    args = q, zero.to(torch.int32)
    target = Target.for_testing(isa="avx512_vnni")
    fast = qfuse.compile(model, args, options={"backend": "eager"}, check="site", target=target)

    assert [event.kernel for event in fast.report.fused] == ["qfuse.linear_w8a8"]
    assert fast.report.rolled_back == ()
    if form == "floats":
        torch.testing.assert_close(fast(*args), model(*args), rtol=1e-5, atol=1e-3)
    else:
        assert torch.equal(fast(*args), model(*args))
