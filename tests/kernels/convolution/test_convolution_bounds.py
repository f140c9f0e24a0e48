"""Convolutions touch no memory behind or before their operands."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.cases.convolution_kernel import convolution, window
from tests.support.cases.linear_kernel import STORED, codes
from tests.support.guard_pages import assert_same_with_guards

from qfuse.kernels import convolution_w8a8, convolution_w8a8_quantized

WINDOWS = {
    "1x1": window(1, 1),
    "3x3": window(3, 3),
    "3x3 padded": window(3, 3, padding=1, stride=2),
    "dilated": window(2, 3, dilation=2, padding=1),
    "groups": window(3, 3, groups=2),
}
# Channels of a group and output channels of a group; then the size.
SIZES = ((1, 1, 7), (3, 5, 4), (4, 16, 5), (17, 63, 3), (65, 65, 3))


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("last", [False, True])
def test_convolution(isa: str, name: str, dtype: torch.dtype, *, last: bool) -> None:
    del isa
    w = WINDOWS[name]
    for channels, features, size in SIZES:
        n, c = features * w.groups, channels * w.groups
        case = convolution(
            (2, c, size, size + 1), n, w, dtype=dtype, last=last, weight_zero_point=True
        )
        out = case.run().shape
        residual = torch.randn(out[0], n + 3, *out[2:]).contiguous(
            memory_format=torch.channels_last
        )
        extras = [
            residual[:, 3:], torch.randn(out[0], n, 1, 1), torch.randn(out[1:]),
            codes(tuple(out), torch.uint8).contiguous(memory_format=torch.channels_last),
        ]  # fmt: skip
        text = "act(gelu)|add(0,0.5)|mul(1)|add(2,1.0)|add(3,1.0,0.1,7)"
        case = case.with_options(extras=extras, epilogue=text)
        wide = torch.nn.functional.pad(case.x.permute(0, 2, 3, 1), (2, 3))
        output = {
            "out_scale": torch.tensor([0.05]), "out_zero_point": torch.tensor([3]),
            "quant_min": -128, "quant_max": 127, "out_dtype": torch.int8,
        }  # fmt: skip

        for x in (case.x, wide[..., 2:-3].permute(0, 3, 1, 2)):
            args, options = replace(case, x=x).arguments()
            assert_same_with_guards(convolution_w8a8, args, options)
            assert_same_with_guards(convolution_w8a8_quantized, args, {**options, **output})
