from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.dialects import fired
from tests.support.sources.library import (
    Model,
    activations,
    close,
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
from qfuse.normalize.importers.library.onednn_linear import NormalizeOnednnLinear

ONEDNN = torch.ops.onednn
PostOp = tuple[str, list[float], str]
POST_OPS: list[PostOp] = [
    ("none", [], ""),
    ("relu", [], ""),
    ("gelu", [], "none"),
    ("gelu", [], "tanh"),
    ("hardtanh", [-0.5, 0.7], ""),
    ("hardswish", [], ""),
    ("swish", [], ""),
    ("leaky_relu", [0.1], ""),
    ("tanh", [], ""),
]
NONE, RELU = POST_OPS[:2]


def buffers(n: int, k: int, *, one: bool = False) -> dict[str, torch.Tensor]:
    scales = torch.rand(1 if one else n) * 0.01 + 1e-4
    return {
        "p": ONEDNN.qlinear_prepack(weights(n, k), None),
        "s": scales,
        "z": torch.zeros(len(scales), dtype=torch.int32),
        "b": torch.randn(n),
    }


def model(
    n: int, k: int, post: PostOp, dtype: torch.dtype, scale: float = 1.0, zero: int = 0
) -> Model:
    return Model(
        lambda s, x: ONEDNN.qlinear_pointwise(
            *(x, 0.03, 7, s.p, s.s, s.z, s.b, scale, zero, dtype, *post)
        ),
        **buffers(n, k),
    )


def test_golden() -> None:
    source = model(16, 32, RELU, torch.uint8, 0.11, 5)
    program = normalize(capture(source, (activations(3, 32),)))
    assert fired(program) == [NormalizeOnednnLinear.name]
    assert_expected_inline(
        to_text(program.graph),
        """\
%args_0: uint8[3, 32]
const %b: float32[16]
const %qlinear_pointwise_x_scale: float32[1, 1]
const %qlinear_pointwise_x_zero_point: int32[1, 1]
%0 = qfuse.dequantize(%args_0, %qlinear_pointwise_x_scale, %qlinear_pointwise_x_zero_point, 'uint8[0,255] *x* float32 float32:reciprocal:round-zp int'): float32[3, 32]
const %p_unpacked: int8[16, 32]
const %s_grid: float32[16, 1]
%1 = qfuse.dequantize(%p_unpacked, %s_grid, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[16, 32]
%2 = aten.linear(%0, %1, %b): float32[3, 16]
%3 = aten.relu(%2): float32[3, 16]
const %qlinear_pointwise_output_scale: float32[1, 1]
const %qlinear_pointwise_output_zero_point: int32[1, 1]
%4 = qfuse.quantize(%3, %qlinear_pointwise_output_scale, %qlinear_pointwise_output_zero_point, 'uint8[0,255] *x* float32 float32:reciprocal:round-zp int'): uint8[3, 16]
return (%4)""",
    )


@pytest.mark.own_kernels
@pytest.mark.numeric
@pytest.mark.parametrize("post", POST_OPS, ids=lambda post: post[0] + post[2])
@pytest.mark.parametrize("stored", [torch.uint8, torch.int8])
def test_float_results(post: PostOp, stored: torch.dtype) -> None:
    source, x = model(19, 40, post, torch.float32), activations(2, 3, 40, dtype=stored)
    done = compiled(source, x)
    assert kernel_of(done.report) == "qfuse.linear_w8a8"
    close(done(x), source(x), 1e-5)


@pytest.mark.own_kernels
@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("one", [False, True])
def test_quantized_results(dtype: torch.dtype, one: bool) -> None:
    source = Model(
        lambda s, x: ONEDNN.qlinear_pointwise(
            *(x, 0.03, 7, s.p, s.s, s.z, None, 0.11, 5, dtype, *RELU)
        ),
        **buffers(32, 64, one=one),
    )
    x = activations(5, 64)
    done = compiled(source, x)
    assert kernel_of(done.report) == "qfuse.linear_w8a8"
    one_step_apart(done(x), source(x))


@pytest.mark.own_kernels
def test_a_bfloat16_result() -> None:
    source, x = model(19, 40, NONE, torch.bfloat16), activations(5, 40)
    done = compiled(source, x)
    assert kernel_of(done.report) == "qfuse.linear_w8a8"
    close(done(x), source(x), 2e-2)


def test_dynamic_scales_and_a_summand() -> None:
    source = Model(
        lambda s, x, scale, zero, other: ONEDNN.qlinear_pointwise(
            *(x, scale, zero, s.p, s.s, s.z, other, s.b),
            *(1.0, 0, torch.float32, 1.0, 0, "add", 1.0, "relu", [], ""),
        ),
        **buffers(24, 32),
    )
    zero = torch.tensor([9], dtype=torch.int32)
    args = activations(5, 32), torch.tensor([0.02]), zero, torch.randn(5, 24)
    done = compiled(source, *args)
    assert done.report.fired["normalize-onednn-linear"] == 1
    close(done(*args), source(*args), 1e-5)


def test_refuses_zero_points_of_the_weight() -> None:
    source = model(16, 32, NONE, torch.float32)
    source.z = torch.ones(16, dtype=torch.int32)
    miss = miss_of(source, activations(5, 32))
    assert miss.code is MissCode.ZERO_POINT
    assert miss.reason == "its weight has zero points other than 0"


def test_refuses_a_float8_result() -> None:
    miss = miss_of(model(16, 32, NONE, torch.float8_e4m3fn), activations(5, 32))
    assert miss.code is MissCode.DTYPE
    assert miss.reason == "its result is torch.float8_e4m3fn"


def test_refuses_an_accumulator_that_is_an_input() -> None:
    source = Model(
        lambda s, x, other: ONEDNN.qlinear_pointwise(
            *(x, 0.03, 7, s.p, s.s, s.z, other, s.b),
            *(1.0, 0, torch.float32, 1.0, 0, "sum", 1.0, "none", [], ""),
        ),
        **buffers(24, 32),
    )
    miss = miss_of(source, activations(5, 32), torch.randn(5, 24))
    assert miss.code is MissCode.SHARED
    assert miss.reason == "it overwrites its summand, which is used elsewhere"
