from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.dialects import fired
from tests.support.sources.library import (
    Model,
    activations,
    compiled,
    kernel_of,
    miss_of,
    one_step_apart,
    weights,
)

from qfuse.capture import capture
from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.normalize import normalize
from qfuse.normalize.importers.library.onednn_convolution import NormalizeOnednnConvolution

ONEDNN = torch.ops.onednn
CASES = [
    *((2, groups, post) for groups in (1, 2) for post in ("none", "relu", "hardtanh", "swish")),
    *((3, groups, "none") for groups in (1, 2)),
]


def model(axes: int, groups: int, post: str, stride: int = 1) -> Model:
    ones, strides = [1] * axes, [stride] * axes
    weight = weights(16, 8 // groups, *[3] * axes)
    scales = torch.rand(16) * 0.01 + 1e-4
    packed = ONEDNN.qconv_prepack(weight, scales, 0.03, 7, strides, ones, ones, groups, None)
    # torch can trace the generic op, and the one of two axes.
    op = ONEDNN.qconv2d_pointwise if axes == 2 and groups == 1 else ONEDNN.qconv_pointwise
    numbers = [-1.0, 6.0] if post == "hardtanh" else []
    return Model(
        lambda s, x: op(
            *(x, 0.03, 7, s.p, s.s, s.z, s.b, strides, ones, ones, groups),
            *(0.13, 4, torch.uint8, post, numbers, ""),
        ),
        p=packed,
        s=scales,
        z=torch.zeros(16, dtype=torch.int32),
        b=torch.randn(16),
    )


def image(axes: int) -> torch.Tensor:
    return activations(2, 8, *[6] * axes, features=1)


def test_golden() -> None:
    program = normalize(capture(model(2, 1, "relu"), (image(2),)))
    assert fired(program) == [NormalizeOnednnConvolution.name]
    assert_expected_inline(
        to_text(program.graph),
        """\
%args_0: uint8[2, 8, 6, 6]
const %b: float32[16]
const %qconv2d_pointwise_x_scale: float32[1, 1, 1, 1]
const %qconv2d_pointwise_x_zero_point: int32[1, 1, 1, 1]
%0 = qfuse.dequantize(%args_0, %qconv2d_pointwise_x_scale, %qconv2d_pointwise_x_zero_point, 'uint8[0,255] *x*x*x* float32 float32:reciprocal:round-zp int'): float32[2, 8, 6, 6]
const %p_unpacked: int8[16, 8, 3, 3]
const %s_grid: float32[16, 1, 1, 1]
%1 = qfuse.dequantize(%p_unpacked, %s_grid, None, 'int8[-128,127] 1x*x*x* float32 float32:reciprocal:round-zp int'): float32[16, 8, 3, 3]
%2 = aten.convolution(%0, %1, %b, (1, 1), (1, 1), (1, 1), False, (0, 0), 1): float32[2, 16, 6, 6]
%3 = aten.relu(%2): float32[2, 16, 6, 6]
const %qconv2d_pointwise_output_scale: float32[1, 1, 1, 1]
const %qconv2d_pointwise_output_zero_point: int32[1, 1, 1, 1]
%4 = qfuse.quantize(%3, %qconv2d_pointwise_output_scale, %qconv2d_pointwise_output_zero_point, 'uint8[0,255] *x*x*x* float32 float32:reciprocal:round-zp int'): uint8[2, 16, 6, 6]
return (%4)""",
    )


@pytest.mark.own_kernels
@pytest.mark.numeric
@pytest.mark.parametrize(("axes", "groups", "post"), CASES)
@pytest.mark.parametrize("stride", [1, 2])
def test_values(axes: int, groups: int, post: str, stride: int) -> None:
    source, x = model(axes, groups, post, stride), image(axes)
    done = compiled(source, x)
    assert kernel_of(done.report) == "qfuse.convolution_w8a8"
    one_step_apart(done(x), source(x))


def test_refuses_a_shape_that_torch_traces_wrongly() -> None:
    # torch 2.13 computes the shape from the packed weight, which has an axis more.
    miss = miss_of(model(1, 1, "relu"), image(1))
    assert miss.code is MissCode.SHAPE
    text = "torch's shape function says that its axis 2 has the size 8, and it has 6"
    assert miss.reason == text
