from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.dialects import fired
from tests.support.sources.library import NOISE, Model, close, compiled, kernel_of, miss_of

from qfuse.capture import capture
from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.normalize import normalize
from qfuse.normalize.importers.library.scaled_mm_v2 import NormalizeScaledMmV2
from qfuse.rewrite.rule import Miss
from qfuse.testing.build import GraphBuilder

ATEN = torch.ops.aten
TENSOR, ROW, BLOCK = [0], [1], [3]


def model(m: int, n: int, k: int, dtype: torch.dtype, *, rowwise: bool, bias: bool) -> Model:
    buffers = {
        "w": torch.randn(n, k).to(torch.float8_e4m3fn),
        "r": torch.rand(1, n) if rowwise else torch.tensor(0.07),
        "l": torch.rand(m, 1) if rowwise else torch.tensor(0.3),
    }
    if bias:
        buffers["b"] = torch.randn(n, dtype=dtype)
    how = ROW if rowwise else TENSOR

    def product(s: Any, x: torch.Tensor) -> torch.Tensor:
        added = s.b if bias else None
        y: torch.Tensor = ATEN._scaled_mm_v2(
            x, s.w.t(), [s.l], how, [0], [s.r], how, [0], added, dtype
        )
        return y

    return Model(product, **buffers)


def test_golden() -> None:
    source = model(5, 16, 32, torch.bfloat16, rowwise=True, bias=False)
    program = normalize(capture(source, (torch.ones(5, 32).to(torch.float8_e4m3fn),)))
    assert fired(program) == [NormalizeScaledMmV2.name]
    assert_expected_inline(
        to_text(program.graph),
        """\
%args_0: float8_e4m3fn[5, 32]
const %w: float8_e4m3fn[16, 32]
const %l: float32[5, 1]
%0 = qfuse.dequantize(%args_0, %l, None, 'float8_e4m3fn[-448,448] 1x* float32 float32:reciprocal:round-zp int'): float32[5, 32]
const %r_t: float32[16, 1]
%1 = qfuse.dequantize(%w, %r_t, None, 'float8_e4m3fn[-448,448] 1x* float32 float32:reciprocal:round-zp int'): float32[16, 32]
%2 = aten.linear(%0, %1): float32[5, 16]
%3 = aten._to_copy(%2, dtype=bfloat16): bfloat16[5, 16]
return (%3)""",
    )


@pytest.mark.own_kernels
@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_values(dtype: torch.dtype, rowwise: bool, bias: bool) -> None:
    source = model(5, 32, 48, dtype, rowwise=rowwise, bias=bias)
    x = torch.randn(5, 48).to(torch.float8_e4m3fn)
    done = compiled(source, x)
    assert done.report.fired["normalize-scaled-mm-v2"] == 1
    assert kernel_of(done.report) == "qfuse.linear_w8a16"
    close(done(x), source(x), NOISE[dtype])


@pytest.mark.parametrize(
    ("scales", "recipe", "swizzle", "code", "reason"),
    [
        (1, BLOCK, [0], MissCode.GRANULARITY, "its scales are in the recipe"),
        (2, [0, 0], [0], MissCode.GRANULARITY, "its scales have several levels"),
        (1, TENSOR, [1], MissCode.ARGUMENT, "its scales are swizzled"),
    ],
)
def test_refuses_other_recipes(
    scales: int, recipe: list[int], swizzle: list[int], code: MissCode, reason: str
) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float8_e4m3fn, 4, 32)
    w = b.const("w", torch.randn(32, 16).to(torch.float8_e4m3fn))
    s = b.const("s", torch.tensor(0.1))
    node = b.call(
        ATEN._scaled_mm_v2.default, x, w, [s], TENSOR, [0], [s], TENSOR, [0], None, torch.float32
    )
    node.update_arg(2, [s] * scales)
    node.update_arg(3, recipe)
    node.update_arg(4, swizzle)
    miss = NormalizeScaledMmV2().match(node)
    assert isinstance(miss, Miss)
    assert miss.code is code
    assert miss.reason.startswith(reason)


def test_refuses_a_product_of_activations() -> None:
    def product(s: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = ATEN._scaled_mm_v2(
            x, w.t(), [s.s], TENSOR, [0], [s.s], TENSOR, [0], None, torch.float32
        )
        return y

    source = Model(product, s=torch.tensor(0.1))
    left, right = torch.randn(3, 64), torch.randn(16, 64)
    miss = miss_of(source, left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn))
    assert miss.code is MissCode.NOT_CONSTANT
