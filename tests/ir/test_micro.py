"""Microscaling, by bits: torchao's references, and MXINT8 by the formula of the specification."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from qfuse.ir.errors import BlockError, NormalizeError, VerifyError
from qfuse.ir.movement.base import Moved, move_levels
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.epilogue import Epilogue
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.element import CONTAINER, Element, ScaleFormat, encode
from qfuse.ir.quant.reference import dequantize, quantize
from qfuse.ir.quant.spec import Arithmetic, QuantSpec, ZeroPointDomain, stored_range
from qfuse.ir.refusal import Refusal
from qfuse.ir.stages.verify import verify
from qfuse.testing.build import GraphBuilder
from qfuse.zoo._torchao_api import quiet_imports

with quiet_imports():
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
    from torchao.prototype.mx_formats.kernels import unpack_uint4
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import (
        NVFP4Tensor,
        nvfp4_quantize,
        per_tensor_amax_to_scale,
    )

from qfuse.ir.quant.spec import Block

pytestmark = pytest.mark.numeric

E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
FORMATS = [
    (E4M3, Element.WHOLE, E4M3),
    (torch.float8_e5m2, Element.WHOLE, torch.float8_e5m2),
    (CONTAINER, Element.E2M3, DTYPE_FP6_E2M3),
    (CONTAINER, Element.E3M2, DTYPE_FP6_E3M2),
    (CONTAINER, Element.E2M1, torch.float4_e2m1fn_x2),
]
COMPUTE_DTYPES = [torch.float32, torch.bfloat16]


def hard_rows(float_dtype: torch.dtype) -> torch.Tensor:
    """Rows of 64 numbers: all exponents, zeros, infinities, NaN, subnormals, ties, saturation."""
    rows = [torch.randn(64) * 2.0**e for e in range(-149, 128, 3)]
    rows += [torch.zeros(64), -torch.zeros(64)]
    for value in (torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-45, 1.17549435e-38):
        for row in (torch.randn(64), torch.zeros(64)):
            row[3] = value
            rows.append(row)
    rows += [torch.arange(64) / k for k in (1, 2, 3, 4, 8, 16)]
    tops = (6.0, 7.5, 28.0, 448.0, 57344.0)
    rows += [torch.full((64,), top * 2.0**k) for top in tops for k in range(-140, 110, 9)]
    # Right beside where a power of two, or the greatest element, changes the exponent.
    edges = torch.tensor([*(2.0**k for k in range(-6, 10)), *tops])
    beside = torch.cat([torch.nextafter(edges, edges * s) for s in (0.0, 2.0)])
    rows += [torch.cat([edge.reshape(1), torch.randn(63) * edge / 9]) for edge in beside]
    return torch.stack(rows).to(float_dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where two tensors are equal by bits, or both NaN, of which there are several."""
    x, y = a.to(torch.float32), b.to(torch.float32)
    return (x.view(torch.int32) == y.view(torch.int32)) | (x.isnan() & y.isnan())


def mx_specs(
    dtype: torch.dtype,
    element: Element,
    mode: str,
    float_dtype: torch.dtype,
    block: Block = (1, 32),
) -> tuple[ChooseSpec, QuantSpec]:
    codes = stored_range(dtype, element)
    math_ = Arithmetic(reciprocal=mode == "rceil")
    choose = ChooseSpec(Formula(f"mx-{mode}"), dtype, *codes, block, 0.0, E8M0, element=element)
    none = ZeroPointDomain.NONE
    return choose, QuantSpec(
        dtype, *codes, block, float_dtype, math_, none, element, ScaleFormat.E8M0
    )


@pytest.mark.parametrize("float_dtype", COMPUTE_DTYPES)
@pytest.mark.parametrize("mode", [mode.value for mode in ScaleCalculationMode])
@pytest.mark.parametrize(("dtype", "element", "theirs"), FORMATS)
def test_mx_is_that_of_torchao(
    dtype: torch.dtype, element: Element, theirs: object, mode: str, float_dtype: torch.dtype
) -> None:
    x = hard_rows(float_dtype)
    choose, spec = mx_specs(dtype, element, mode, float_dtype)
    scale, zero = ops.choose_qparams(x, str(choose))
    q = ops.quantize(x, scale, None, str(spec))
    y = ops.dequantize(q, scale, None, str(spec))

    want_scale, want = to_mx(x, theirs, 32, ScaleCalculationMode(mode))
    assert torch.equal(scale.view(torch.uint8), want_scale.view(torch.uint8))
    assert not zero.any()
    finite = ~x.isnan()  # An element that is NaN has no code.
    if element is Element.WHOLE:
        assert bool(same_bits(q, want).all())
    else:
        codes = unpack_uint4(want) if element is Element.E2M1 else want
        assert torch.equal(encode(q, element)[finite], codes[finite])
    back = to_dtype(want, want_scale, theirs, 32, float_dtype)
    assert y.dtype is float_dtype
    assert bool(same_bits(y, back).all()), "a block with NaN is NaN in both"


def nvfp4_specs(float_dtype: torch.dtype, *, two: bool) -> tuple[ChooseSpec, QuantSpec]:
    tiny = torch.finfo(E4M3).tiny
    element, none = Element.E2M1, ZeroPointDomain.NONE
    choose = ChooseSpec(
        Formula.NVFP4, CONTAINER, -6, 6, (1, 16), tiny, E4M3, element=element, outer=two
    )
    outer: Block | None = (None, None) if two else None
    form = ScaleFormat.E4M3
    spec = QuantSpec(
        CONTAINER, -6, 6, (1, 16), float_dtype, Arithmetic(), none, element, form, outer
    )
    return choose, spec


@pytest.mark.parametrize("float_dtype", COMPUTE_DTYPES)
@pytest.mark.parametrize("amax", [None, 40.0, 3.2e-4, 1e30, 0.0, math.inf, math.nan])
def test_nvfp4_is_that_of_torchao(amax: float | None, float_dtype: torch.dtype) -> None:
    x = hard_rows(float_dtype)
    given = None if amax is None else per_tensor_amax_to_scale(torch.tensor(amax))
    choose, spec = nvfp4_specs(float_dtype, two=given is not None)
    outer = None if given is None else given.reshape(1, 1)
    scale, _ = ops.choose_qparams(x, str(choose), outer)
    q = ops.quantize(x, scale, None, str(spec), outer)
    y = ops.dequantize(q, scale, None, str(spec), outer)

    want_scale, packed = nvfp4_quantize(x, 16, given)
    want_scale = want_scale.view(scale.shape)
    assert bool(same_bits(scale, want_scale).all())
    back = NVFP4Tensor(packed, want_scale, 16, float_dtype, given).dequantize(float_dtype)
    assert bool(same_bits(y, back).all())
    known = ~back.isnan()
    assert torch.equal(encode(q, Element.E2M1)[known], unpack_uint4(packed)[known])


@pytest.mark.parametrize("float_dtype", COMPUTE_DTYPES)
def test_the_second_level_of_nvfp4_is_chosen_as_torchao_does(float_dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 32).to(float_dtype) * 37
    choose = ChooseSpec(
        Formula.NVFP4_OUTER, CONTAINER, -6, 6, (None,) * 3, 0.0, element=Element.E2M1
    )
    outer, _ = ops.choose_qparams(x, str(choose))
    assert outer.shape == (1, 1, 1)
    assert torch.equal(outer.reshape(()), per_tensor_amax_to_scale(x.abs().max()))


def test_mxint8_by_the_formula() -> None:
    # torchao has no integers in MX: elements are q * 2 ** -6, so the exponent is lower by 6.
    x = torch.randn(7, 64) * 2.0 ** torch.randint(-20, 20, (7, 1))
    choose, spec = mx_specs(torch.int8, Element.WHOLE, "floor", torch.float32)
    scale, _ = ops.choose_qparams(x, str(choose))
    q = ops.quantize(x, scale, None, str(spec))
    for row, part in itertools.product(range(7), range(2)):
        block = x[row, 32 * part : 32 * part + 32].double()
        power = 2.0 ** (math.floor(math.log2(block.abs().max().item())) - 6)
        assert scale[row, part].float().item() == power
        want = (block / power).round().clamp(-128, 127)
        assert torch.equal(q[row, 32 * part : 32 * part + 32].double(), want)
    assert q.dtype is torch.int8
    assert (q.float().abs().amax(1) >= 64).all(), "the range is used"


def test_a_last_block_may_be_partial_and_blocks_lie_along_any_axis() -> None:
    x = torch.randn(40, 3)
    choose, spec = mx_specs(CONTAINER, Element.E2M1, "floor", torch.float32, (32, 1))
    scale, _ = ops.choose_qparams(x, str(choose))
    assert scale.shape == (2, 3)
    q = ops.quantize(x, scale, None, str(spec))
    y = ops.dequantize(q, scale, None, str(spec))

    padded = torch.cat([x, torch.zeros(24, 3)]).t().contiguous()
    want_scale, want = to_mx(padded, torch.float4_e2m1fn_x2, 32)
    back = to_dtype(want, want_scale, torch.float4_e2m1fn_x2, 32, torch.float32)
    assert torch.equal(scale.view(torch.uint8), want_scale.view(torch.uint8).t())
    assert torch.equal(y, back.t()[:40])


def test_what_is_empty_has_neutral_scales() -> None:
    choose, spec = mx_specs(CONTAINER, Element.E2M1, "floor", torch.float32)
    x = torch.empty(0, 32)
    scale, _ = ops.choose_qparams(x, str(choose))
    assert scale.shape == (0, 1)
    assert ops.quantize(x, scale, None, str(spec)).shape == x.shape


def test_the_text_says_format_block_rounding_and_levels() -> None:
    choose, spec = mx_specs(CONTAINER, Element.E2M1, "even", torch.bfloat16)
    assert str(spec) == "float4_e2m1[-6,6] 1x32 bfloat16 float32:divide:round-zp none e8m0"
    assert str(choose) == "mx-even float4_e2m1[-6,6] 1x32 eps=0.0 float8_e8m0fnu int32"
    choose, spec = nvfp4_specs(torch.float32, two=True)
    arithmetic = "float32:reciprocal:round-zp"
    assert str(spec) == f"float4_e2m1[-6,6] 1x16 float32 {arithmetic} none e4m3 outer=*x*"
    text = "nvfp4 float4_e2m1[-6,6] 1x16 eps=0.015625 float8_e4m3fn int32 outer"
    assert str(choose) == text
    assert spec.bits == 4
    assert spec.is_full_range


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("float4_e2m1[-7,7] 1x32 float32 float32:divide:round-zp none e8m0", "does not fit"),
        ("float4_e2m1[-6,6] 1x32 float32 float32:divide:round-zp int e8m0", "zero point"),
        ("int8[-128,127] 1x32 float32 bfloat16:divide:round-zp none e8m0", "computed in float32"),
        ("int8[-128,127] 1x32 float32 float32:divide:round-zp none e8m0 outer=*x*", "two"),
        ("float4_e2m1[-6,6] 1x16 float32 float32:divide:round-zp none e4m3 outer=*", "levels"),
        ("float4_e2m1[-6,6] 1x16 float32 float32:divide:round-zp none e4m3 outer=0x1", "positive"),
        ("float4_e3m0[-6,6] 1x16 float32 float32:divide:round-zp none e4m3", "float4_e3m0"),
    ],
)
def test_specs_that_mean_nothing_are_refused(text: str, reason: str) -> None:
    with pytest.raises((NormalizeError, BlockError), match=reason):
        QuantSpec.parse(text)


def test_only_nvfp4_takes_a_second_scale() -> None:
    with pytest.raises(NormalizeError, match="takes no second scale"):
        ChooseSpec.parse("mx-floor float4_e2m1[-6,6] 1x32 eps=0.0 float8_e8m0fnu int32 outer")


@pytest.mark.parametrize("two", [False, True])
def test_no_level_of_scales_is_dropped_or_made_up(two: bool) -> None:
    levels: Block | None = (None, None) if two else None
    arithmetic, none, form = Arithmetic(), ZeroPointDomain.NONE, ScaleFormat.E4M3
    spec = QuantSpec(
        *(CONTAINER, -6, 6, (None, None), torch.float32, arithmetic, none, Element.E2M1, form),
        levels,
    )
    x, scale = torch.randn(2, 4), torch.ones(1, 1).to(E4M3)
    outer = None if two else torch.ones(1, 1)

    with pytest.raises(AssertionError, match="levels of scales"):
        quantize(x, scale, None, spec, outer)
    with pytest.raises(AssertionError, match="levels of scales"):
        dequantize(x.to(CONTAINER), scale, None, spec, outer)


@pytest.mark.parametrize("text", ["round(0,-,{})", "mul(2,0,-,{})"])
def test_a_step_rounds_with_one_level_of_scales(text: str) -> None:
    spec = "float4_e2m1[-6,6] 1x16 float32 float32:divide:round-zp none e4m3"

    assert str(Epilogue.parse(text.format(spec))) == text.format(spec)
    with pytest.raises(NormalizeError, match="one level"):
        Epilogue.parse(text.format(f"{spec} outer=*x*"))


def test_both_levels_move_or_none() -> None:
    def move(block: Block) -> Moved | Refusal:
        return Refusal("it is fine") if 1 in block else Moved(block, lambda _, value: value)

    both = move_levels(move, (None, 16), (None, None))
    assert isinstance(both, Moved)
    assert both.outer is not None
    assert both.outer.block == (None, None)
    assert isinstance(move_levels(move, (1, 16), (None, None)), Refusal)
    blocked = move_levels(move, (None, 16), (1, None))
    assert isinstance(blocked, Refusal)
    assert blocked.reason == "their second level of scales, in blocks of 1x*: it is fine"


@pytest.mark.parametrize(
    ("scale", "outer", "reason"),
    [
        (torch.ones(2, 2), torch.ones(1, 1), "the scale is torch.float32"),
        (torch.ones(2, 2).to(E4M3), None, "second level"),
        (torch.ones(2, 2).to(E4M3), torch.ones(2, 1), "does not fit"),
    ],
)
def test_a_graph_says_what_its_specs_say(
    scale: torch.Tensor, outer: torch.Tensor | None, reason: str
) -> None:
    b = GraphBuilder()
    _, spec = nvfp4_specs(torch.float32, two=True)
    x = b.arg("x", torch.float32, 2, 32)
    rest = [] if outer is None else [b.const("outer", outer)]
    node = b.call(ops.quantize, x, b.const("scale", scale), None, str(spec), *rest)
    with pytest.raises(VerifyError, match=reason):
        verify(b.done(node))


@pytest.mark.parametrize("given", [True, False])
def test_a_choice_says_whether_a_second_scale_is_given(given: bool) -> None:
    b = GraphBuilder()
    choose, _ = nvfp4_specs(torch.float32, two=not given)
    rest = [b.const("outer", torch.ones(1, 1))] if given else []
    pair = b.call(ops.choose_qparams, b.arg("x", torch.float32, 2, 32), str(choose), *rest)
    with pytest.raises(VerifyError, match="second scale"):
        verify(b.done(b.item(pair, 0)))
