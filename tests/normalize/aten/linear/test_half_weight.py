from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.dialects import fired
from tests.support.sources.library import Model, close, compiled, kernel_of
from torch.nn import functional as F

from qfuse.capture import capture
from qfuse.ir.events import MissCode, Missed
from qfuse.ir.graph.text import to_text
from qfuse.normalize import normalize
from qfuse.normalize.aten.linear.half_weight import DequantizeHalfWeight

importlib.import_module("torch.ao.quantization.fx._decomposed")
cast = torch.ops.quantized_decomposed.convert_element_type.no_fuse


def model(weight: torch.Tensor, *, relu: bool = False) -> Model:
    """A linear with dynamic float16, as PT2E writes it."""

    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        half = s.w if s.w.dtype is torch.float16 else cast(s.w, torch.float16)
        y = F.linear(x, cast(half, torch.float32), s.b)
        return y.relu() if relu else y

    return Model(forward, w=weight, b=torch.randn(len(weight)))


def test_golden() -> None:
    program = normalize(capture(model(torch.randn(16, 32).half()), (torch.randn(3, 32),)))
    assert DequantizeHalfWeight.name in fired(program)
    assert_expected_inline(
        to_text(program.graph),
        """\
%args_0: float32[3, 32]
const %w: float16[16, 32]
const %b: float32[16]
const %one_of_rank_2: float32[1, 1]
%0 = qfuse.dequantize(%w, %one_of_rank_2, None, 'float16[-65504,65504] *x* float32 float32:reciprocal:round-zp int'): float32[16, 32]
%1 = aten.linear(%args_0, %0, %b): float32[3, 16]
return (%1)""",
    )


@pytest.mark.numeric
@pytest.mark.own_kernels
@pytest.mark.pairs
@pytest.mark.parametrize("stored", [torch.float16, torch.float32])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3), (40,)])
def test_values(stored: torch.dtype, relu: bool, shape: tuple[int, ...]) -> None:
    source, x = model(torch.randn(70, 50).to(stored), relu=relu), torch.randn(*shape, 50)
    done = compiled(source, x)
    assert kernel_of(done.report) == "qfuse.linear_w16a32"
    close(done(x), source(x), 1e-5)
    held = [b for b in done.plan.lowered.module.buffers() if b.numel() >= 70 * 50]
    assert [b.dtype for b in held] == [torch.float16]


def test_special_values() -> None:
    weight = torch.tensor([[6e-8, float("inf")], [float("nan"), -0.0], [65504.0, 1.0]]).half()
    source, x = model(weight), torch.ones(1, 2)
    torch.testing.assert_close(compiled(source, x)(x), source(x), equal_nan=True)


def test_refuses_a_weight_of_the_caller() -> None:
    source = Model(lambda _, x, w: F.linear(x, cast(w, torch.float32)))
    program = normalize(capture(source, (torch.randn(3, 8), torch.randn(4, 8).half())))
    (miss,) = (m for m in program.log.of(Missed) if m.rule == DequantizeHalfWeight.name)
    assert miss.code is MissCode.NOT_CONSTANT
    assert miss.reason == "the float16 weight is computed at run time"
