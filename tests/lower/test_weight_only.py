from __future__ import annotations

import pytest
import torch
from tests.lower.cases import NO_KERNELS, lowered, pairs, the_kernel, why_not

from qfuse.ir.events import Exactness
from qfuse.rewrite.compare import compare
from qfuse.rewrite.tolerance import SITE
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import QuantizedLinear, per_channel

NAME = "aten._weight_int8pack_mm"


@pytest.mark.numeric
@pytest.mark.parametrize("shape", [(1,), (3,), (1, 1), (2, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_values_at_every_rank(shape: tuple[int, ...], bias: bool) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, *shape, 64)
    program = b.done(QuantizedLinear(b, 48, 64, bias=bias).linear(x))
    low = lowered(program, NO_KERNELS)

    assert the_kernel(low) == NAME
    for new, old in pairs(program, low):
        assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None


def test_refuses_scales_that_would_be_rounded() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.bfloat16, 2, 64)
    block = QuantizedLinear(b, 48, 64, bias=False, weight=per_channel(real=torch.bfloat16))
    low = lowered(b.done(block.linear(x)), NO_KERNELS)

    assert "would be rounded" in why_not(low, NAME)


def test_refuses_groups() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, 64)
    block = QuantizedLinear(b, 48, 64, weight=per_channel().with_block((1, 32)))
    low = lowered(b.done(block.linear(x)), NO_KERNELS)

    assert "blocks of 1x32" in why_not(low, NAME)
