"""Epilogues and quantized results of convolutions, with extras that broadcast as torch's do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tests.support.cases.convolution_kernel import convolution, depthwise, in_format_of, window
from tests.support.cases.linear_kernel import REAL, STORED, codes

from qfuse.ir.ops.epilogue import Epilogue

pytestmark = pytest.mark.numeric

WINDOWS = {"1x1": window(1, 1), "3x3": window(3, 3, padding=1)}
SHAPE = (2, 70, 6, 5)

EXACT = (
    "act(relu)",
    "act(hardtanh,0.0,6.0)",
    "act(hardswish)",
    "act(hardsigmoid)",
    "act(leaky_relu,0.1)",
    "act(relu)|add(0,1.0)|mul(1)",
    "prelu(0)|cast(bfloat16)|prelu(1)",
    "cast(bfloat16)|add(0,1.0)|act(relu)",
    "mul(0)|cast(float16)|add(1,1.0)|cast(float32)",
)


@pytest.mark.parametrize("real", REAL)
@pytest.mark.parametrize("text", EXACT)
def test_steps_round_as_torch_rounds(isa: str, text: str, real: torch.dtype) -> None:
    del isa
    for types, w in itertools.product(itertools.product(REAL, repeat=2), WINDOWS.values()):
        case = convolution((2, 8, 6, 5), 70, w)
        extras = [torch.randn(SHAPE, dtype=t) for t in types]
        y = case.with_options(extras=extras, epilogue=text, product_dtype=real)
        out_dtype = y.expected().dtype

        assert torch.equal(y.with_options(out_dtype=out_dtype).run(), y.expected())


EXTRAS = {
    "residual": (2, 70, 6, 5),
    "squeeze-excite": (2, 70, 1, 1),
    "channel": (70, 1, 1),
    "one image": (1, 70, 6, 5),
    "positions": (6, 5),
    "positions of images": (2, 1, 6, 5),
    "line": (5,),
    "column": (6, 1),
    "images": (2, 1, 1, 1),
    "element": (1,),
}


@pytest.mark.parametrize("name", EXTRAS)
@pytest.mark.parametrize("last", [False, True])
def test_extras_broadcast(isa: str, name: str, *, last: bool) -> None:
    del isa
    for w, dtype in itertools.product(WINDOWS.values(), (torch.float32, torch.bfloat16)):
        case = convolution((2, 8, 6, 5), 70, w, last=last)
        extra = torch.randn(EXTRAS[name], dtype=dtype)
        wide = torch.randn(*extra.shape[:-1], 2 * extra.shape[-1], dtype=dtype)
        views = [extra, wide[..., ::2]]
        if extra.dim() == 4:
            views.append(extra.contiguous(memory_format=torch.channels_last))
        for view in views:
            y = case.with_options(extras=[view], epilogue="mul(0)")

            assert torch.equal(y.run(), y.expected())


def test_extras_of_groups_and_strided_images(isa: str) -> None:
    del isa
    case = convolution((3, 8, 6, 5), 140, window(3, 3, groups=2))
    wide = torch.randn(6, 200, 9, 7).contiguous(memory_format=torch.channels_last)
    extras = [wide[::2, 10:150, 2:6, 1:4], wide[:3, :140, :1, :1], wide[3:, 60:, 5:, 4:]]
    y = case.with_options(extras=extras, epilogue="add(0,1.0)|mul(1)|add(2,1.0)")

    assert torch.equal(y.run(), y.expected())


@pytest.mark.parametrize("name", EXTRAS)
@pytest.mark.parametrize("dtype", STORED)
def test_quantized_extras_broadcast(isa: str, name: str, dtype: torch.dtype) -> None:
    del isa
    scale, zero = 0.0371, 5
    cases = [convolution((2, 8, 6, 5), 70, w) for w in WINDOWS.values()]
    cases.append(depthwise((2, 70, 6, 5), WINDOWS["3x3"]))
    for case in cases:
        q = codes(EXTRAS[name], dtype)
        extra = (q.float() - zero) * torch.tensor(scale)
        for dtype_of_product in REAL:
            y = case.with_options(
                extras=[extra],
                epilogue="add(0,0.5)|act(relu)|mul(0)",
                product_dtype=dtype_of_product,
            )
            text = f"add(0,0.5,{scale},{zero})|act(relu)|mul(0,{scale},{zero})"
            new = y.with_options(extras=[q], epilogue=text, out_dtype=torch.float32)

            assert torch.equal(new.run(), y.expected())


def quantize(y: torch.Tensor, output: dict[str, Any]) -> torch.Tensor:
    """What the op promises, in torch."""
    scale, zero = output["out_scale"], output["out_zero_point"]
    y = y.float()
    y = y * scale.reciprocal().float() if output["reciprocal"] else y / scale.float()
    shift = 0 if zero is None else zero.float()
    y = (y + shift).round() if output["zero_point_first"] else y.round() + shift
    return y.clamp(output["quant_min"], output["quant_max"]).to(output["out_dtype"])


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("reciprocal", [False, True])
@pytest.mark.parametrize("zero_point_first", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_quantized_output(
    isa: str, dtype: torch.dtype, *, reciprocal: bool, zero_point_first: bool, last: bool
) -> None:
    del isa
    kinds = itertools.product(WINDOWS.values(), ("", "act(relu)|cast(bfloat16)", "add(0,1.0)"))
    for (w, text), zero in itertools.product(kinds, (None, 3)):
        info = torch.iinfo(dtype)
        output = {
            "out_scale": torch.tensor([0.037]),
            "out_zero_point": None if zero is None else torch.tensor([zero]),
            "quant_min": info.min + 20,
            "quant_max": info.max - 20,
            "out_dtype": dtype,
            "reciprocal": reciprocal,
            "zero_point_first": zero_point_first,
        }
        case = convolution((2, 8, 6, 5), 70, w, last=last)
        extras = [torch.randn(SHAPE)] if "add" in text else []
        case = case.with_options(extras=extras, epilogue=text)

        y = case.run_quantized(**output)

        expected = in_format_of(case.x, quantize(case.expected(), output))
        assert torch.equal(y, expected)
        assert y.stride() == expected.stride()
        assert y.dtype == dtype


def test_epilogue_text_is_that_of_linears(isa: str) -> None:
    del isa
    case = convolution((1, 8, 6, 5), 7, WINDOWS["3x3"]).with_options(
        epilogue="act(gelu)|act(tanh)|round(20.0,3.0,-128.0,127.0,0.05)"
    )
    y = Epilogue.parse("act(gelu)|act(tanh)").apply(case.real(), [])
    expected = ((y * 20.0).round() + 3.0).clamp(-128, 127).sub(3.0) * 0.05

    assert (case.run() - expected).abs().max() <= 0.051
    assert (case.run() != expected).float().mean() <= 0.01
