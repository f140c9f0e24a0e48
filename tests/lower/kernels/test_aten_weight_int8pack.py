from __future__ import annotations

import pytest
import torch
from tests.support.cases.lowering import NO_KERNELS, lowered, pairs, the_kernel, why_not

from qfuse.ir.events import Exactness, Lowered
from qfuse.ir.ops import library as ops
from qfuse.rewrite.compare import compare
from qfuse.rewrite.tolerance import SITE
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import QuantizedLinear, per_channel, per_tensor
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten
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


@pytest.mark.numeric
def test_values_of_a_slice_and_of_a_weight_that_is_stored_transposed() -> None:
    b = GraphBuilder()
    h = b.arg("h", torch.float32, 3, 5, 64)
    x = b.call(aten.select.int, h, 1, 0)
    q = b.const("q", torch.randint(-128, 128, (64, 48), dtype=torch.int8).t())
    scale = b.const("scale", torch.rand(48, 1) * 0.01)
    w = b.call(ops.dequantize, q, scale, None, str(per_channel()))
    w2 = b.call(ops.dequantize, q, scale, None, str(per_channel()))
    y = b.call(aten.linear.default, x, w)
    z = b.call(aten.linear.default, b.call(aten.neg.default, x), w2)
    program = b.done(y, z)
    low = lowered(program, NO_KERNELS)

    assert [e.kernel for e in low.log.of(Lowered)] == [NAME, NAME]
    stored = [t for t in low.module.buffers() if t.dtype is torch.int8]
    assert len(stored) == 1, "the weight is laid out once for both"
    for new, old in pairs(program, low):
        assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None


@pytest.mark.parametrize(
    ("k", "float_dtype", "reason"),
    [
        (0, torch.float32, "no input features"),
        (40, torch.bfloat16, "not a multiple of 16"),
        (1, torch.float32, "one input feature, whose stride"),
        (64, torch.float64, "computes in torch.float64"),
    ],
)
def test_refuses_what_torch_has_no_loop_for(k: int, float_dtype: torch.dtype, reason: str) -> None:
    b = GraphBuilder()
    x = b.arg("x", float_dtype, 2, k)
    spec = per_channel(float_dtype=float_dtype) if k else per_tensor(2)
    block = QuantizedLinear(b, 48, k, bias=False, weight=spec)
    program = b.done(block.linear(x))
    low = lowered(program, NO_KERNELS)

    assert the_kernel(low) == "expand"
    assert reason in why_not(low, NAME)
    for new, old in pairs(program, low):
        assert torch.equal(new, old), "what is expanded is the reference itself"


@pytest.mark.numeric
@pytest.mark.parametrize("k", [16, 48, 96])
@pytest.mark.parametrize("n", [1, 7, 48])
def test_values_in_bfloat16(k: int, n: int) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.bfloat16, 65, k)
    stored = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    scales = torch.rand(n, 1).bfloat16()
    q, scale = b.const("q", stored), b.const("scale", scales)
    w = b.call(ops.dequantize, q, scale, None, str(per_channel(float_dtype=torch.bfloat16)))
    program = b.done(b.call(aten.linear.default, x, w))
    low = lowered(program, NO_KERNELS)

    assert the_kernel(low) == NAME
    inputs = random_inputs(program)
    (new,), (old,) = run(low, inputs), run(program, inputs)
    truth = inputs[0].double() @ (stored.double() * scales.double()).t()
    assert compare(new, old, truth, Exactness.ROUNDING, SITE).wrong is None


def test_refuses_scales_that_would_be_rounded() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.bfloat16, 2, 64)
    block = QuantizedLinear(b, 48, 64, bias=False, weight=per_channel(float_dtype=torch.bfloat16))
    low = lowered(b.done(block.linear(x)), NO_KERNELS)

    assert "would round these" in why_not(low, NAME)


def test_refuses_groups() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, 64)
    block = QuantizedLinear(b, 48, 64, weight=per_channel().with_block((1, 32)))
    low = lowered(b.done(block.linear(x)), NO_KERNELS)

    assert "blocks of 1x32" in why_not(low, NAME)
