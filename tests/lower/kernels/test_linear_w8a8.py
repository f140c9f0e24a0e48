from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from tests.support.cases.lowering import NO_KERNELS, lowered, pairs, the_kernel, why_not
from tests.support.sources.aten_spellings import truth

from qfuse.ir.events import Exactness
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.spec import Arithmetic, QuantSpec
from qfuse.rewrite.compare import compare
from qfuse.rewrite.tolerance import SITE
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import QuantizedLinear, per_channel, per_tensor, per_token
from qfuse.testing.run import run

aten = torch.ops.aten
NAME = "qfuse.linear_w8a8"

pytestmark = pytest.mark.own_kernels


def simple(spec: QuantSpec, weight: QuantSpec | None = None) -> tuple[GraphBuilder, torch.fx.Node]:
    """A builder and its only linear, ``[m, 24] -> [m, 40]``, with a bias."""
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "m", 24)
    block = QuantizedLinear(b, 40, 24, weight=weight)
    return b, block.linear(block.quantized(x, spec))


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize("weight", [per_channel(), per_tensor(2), per_channel(dtype=torch.uint8)])
@pytest.mark.parametrize("m", [1, 2, 33])
def test_static_values(dtype: torch.dtype, weight: QuantSpec, m: int) -> None:
    b, y = simple(per_tensor(2, dtype), weight)
    program = b.done(y)
    low = lowered(program)

    assert the_kernel(low) == NAME
    for new, old in pairs(program, low, m=m):
        assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None


@pytest.mark.numeric
@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_one_scale_per_row_at_every_rank(rank: int, asymmetric: bool) -> None:
    b = GraphBuilder()
    shape = [3, 1, 2][: rank - 1]
    x = b.arg("x", torch.float32, *shape, 24)
    spec = per_token(rank)
    grid = [int(g) for g in spec.grid((*shape, 24))]
    scale = b.const("scale", torch.rand(grid) * 0.02 + 1e-3)
    zero = b.const("zero", torch.randint(-20, 20, grid).to(torch.int8)) if asymmetric else None
    q = b.call(ops.quantize, x, scale, zero, str(spec))
    real = b.call(ops.dequantize, q, scale, zero, str(spec))
    program = b.done(QuantizedLinear(b, 40, 24).linear(real))
    low = lowered(program)

    assert the_kernel(low) == NAME
    for new, old in pairs(program, low):
        assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None


@pytest.mark.numeric
def test_epilogue_and_quantized_output_are_in_the_kernel() -> None:
    b, y = simple(per_tensor(2, torch.uint8))
    residual = b.arg("r", torch.float32, "m", 40)
    y = b.call(aten.add.Tensor, b.call(aten.gelu.default, y), residual)
    spec = replace(per_tensor(2, torch.uint8), quant_min=3, quant_max=200)
    q, _, _ = QuantizedLinear(b, 1, 1).stored(y, spec, "out")
    program = b.done(q)
    low = lowered(program)

    calls = [n.target for n in low.graph.nodes if n.op == "call_function"]
    assert calls[-1] is torch.ops.qfuse.linear_w8a8_quantized.default
    assert aten.gelu.default not in calls
    for new, old in pairs(program, low, m=50):
        assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None
        assert (int(new.min()), int(new.max())) >= (3, 3)
        assert int(new.max()) <= 200


@pytest.mark.numeric
def test_an_output_quantized_per_channel_is_left_to_aten() -> None:
    b, y = simple(per_tensor(2))
    spec = QuantSpec(torch.int8, -128, 127, (None, 1))
    scale = b.const("columns", torch.rand(1, 40) * 0.1 + 0.01)
    program = b.done(b.call(ops.quantize, y, scale, None, str(spec)))
    low = lowered(program)

    calls = [n.target for n in low.graph.nodes if n.op == "call_function"]
    assert torch.ops.qfuse.linear_w8a8.default in calls
    for new, old in pairs(program, low, m=9):
        assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None


def test_a_weight_read_by_two_linears_is_packed_once() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "m", 24)
    z = b.arg("z", torch.float32, "m", 24)
    block = QuantizedLinear(b, 40, 24)
    first = block.linear(block.quantized(x, per_tensor(2), "x"))
    second = block.linear(block.quantized(z, per_tensor(2), "z"))
    low = lowered(b.done(first, second))

    packed = [n for n, t in low.module.named_buffers() if t.dtype is torch.int8]
    assert len(packed) == 1, "the plain weight is gone and there is one packed one"


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (QuantSpec(torch.int8, -128, 127, (1, 8)), "blocks of 1x8"),
        (QuantSpec(torch.int8, -128, 127, (None, 1)), "run along the input features"),
        (replace(per_channel(), arithmetic=Arithmetic(torch.float64)), "float64"),
    ],
)
def test_refuses_weights_that_it_would_get_wrong(weight: QuantSpec, reason: str) -> None:
    b, y = simple(per_tensor(2), weight)
    low = lowered(b.done(y))

    assert the_kernel(low) != NAME
    assert re.search(reason, why_not(low, NAME))


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((1, 5), (None, 1, None)),
        ((5, 1), (1, None, None)),
        ((1, 1), (None, None, 24)),
        ((1, 1), (1, None, 32)),
        ((2, 5), (1, 1, 24)),
    ],
)
def test_an_axis_of_one_element_or_one_block_has_no_granularity(
    shape: tuple[int, int], block: tuple[int | None, ...]
) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, *shape, 24)
    spec = per_tensor(3).with_block(block)
    scale = b.const("scale", torch.rand([int(g) for g in spec.grid((*shape, 24))]) * 0.02 + 1e-3)
    q = b.call(ops.quantize, x, scale, None, str(spec))
    real = b.call(ops.dequantize, q, scale, None, str(spec))
    program = b.done(QuantizedLinear(b, 40, 24).linear(real))
    low = lowered(program)

    assert the_kernel(low) == NAME
    for new, old in pairs(program, low):
        assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None


def test_refuses_activations_scaled_along_the_inputs() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "m", 24)
    spec = QuantSpec(torch.int8, -128, 127, (None, 8))
    scale = b.const("scale", torch.rand(1, 3) + 0.1)
    q = b.call(ops.quantize, x, scale, None, str(spec))
    real = b.call(ops.dequantize, q, scale, None, str(spec))
    program = b.done(QuantizedLinear(b, 40, 24).linear(real))
    low = lowered(program)

    assert "blocks of *x8" in why_not(low, NAME)
    for new, old in pairs(program, low, m=5):
        assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None


def with_zeros(
    *, x_zero: torch.Tensor | None = None, w_zero: torch.Tensor | None = None, clamp: bool = False
) -> NormalGraph:
    """A linear ``[3, 24] -> [40]`` with zero points; that of ``x`` is an input unless given."""
    b = GraphBuilder()
    q = b.arg("q", torch.int8, 3, 24)
    scale = b.const("scale", torch.rand(3, 1) * 0.01 + 1e-3)
    if x_zero is not None:
        zero = b.const("zero", x_zero)
    else:
        zero = b.arg("zero", torch.int32, 3, 1)
        zero = b.call(aten.clamp.default, zero, -128, 127) if clamp else zero
    x = b.call(ops.dequantize, q, scale, zero, str(per_token(2)))
    w_scale = b.const("w_scale", torch.rand(40, 1) * 0.01 + 1e-3)
    node = None if w_zero is None else b.const("w_zero", w_zero)
    stored = b.const("w", torch.randint(-128, 128, (40, 24), dtype=torch.int8))
    w = b.call(ops.dequantize, stored, w_scale, node, str(per_channel()))
    return b.done(b.call(aten.linear.default, x, w))


def test_a_zero_point_that_is_clamped_is_known_to_be_a_stored_number() -> None:
    program = with_zeros(clamp=True)
    low = lowered(program)

    assert the_kernel(low) == NAME
    for new, old in pairs(program, low):
        assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None


def test_refuses_a_zero_point_that_may_be_no_stored_number() -> None:
    program = with_zeros()
    low = lowered(program)

    assert the_kernel(low) == "qfuse.linear_w8a16"
    text = "the activation's zero point may be outside [-128, 127], the range of int8"
    assert why_not(low, NAME).startswith(text)
    for new, old in pairs(program, low):
        assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None


@pytest.mark.parametrize("value", [-129, 128, 100_000, 2**32 + 5])
@pytest.mark.parametrize("side", ["activation", "weight"])
def test_refuses_a_constant_zero_point_that_is_no_stored_number(side: str, value: int) -> None:
    grid = (3, 1) if side == "activation" else (40, 1)
    zero = torch.full(grid, 3)
    zero[1] = value
    inside = torch.full((3, 1), 7)
    low = lowered(
        with_zeros(x_zero=zero) if side == "activation" else with_zeros(x_zero=inside, w_zero=zero)
    )

    assert the_kernel(low) == ("expand" if side == "weight" else "qfuse.linear_w8a16")
    assert (
        why_not(low, NAME) == f"the {side} has a zero point outside [-128, 127], the range of int8"
    )


@pytest.mark.numeric
def test_values_of_constant_zero_points_at_the_ends() -> None:
    ends = torch.tensor([-128, 127, 0])[:, None]
    program = with_zeros(x_zero=ends, w_zero=ends.repeat(14, 1)[:40])
    low = lowered(program)

    assert the_kernel(low) == NAME
    for new, old in pairs(program, low):
        assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("dtype", "k", "taken"),
    [
        (torch.int8, 40_000, True),
        (torch.int8, 65_536, True),
        (torch.int8, 65_537, False),
        (torch.uint8, 32_768, True),
        (torch.uint8, 40_000, False),
    ],
)
def test_refuses_sums_that_32_bits_cannot_hold(dtype: torch.dtype, k: int, taken: bool) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, k)
    block = QuantizedLinear(b, 16, k, weight=per_channel(dtype=dtype))
    program = b.done(block.linear(block.quantized(x, per_tensor(2))))
    low = lowered(program)

    assert (the_kernel(low) == NAME) is taken
    if not taken:
        assert "products could overflow" in why_not(low, NAME)
        return
    # Far from rounding: as large as the sums can be.
    inputs = [torch.full((2, k), 1e3)]
    (new,), (meant,) = run(low, inputs), truth(program, inputs)
    assert meant is not None
    assert compare(new, meant.float(), meant, Exactness.ROUNDING, SITE).wrong is None


def test_an_output_zero_point_that_is_no_int32_is_left_to_aten() -> None:
    b, y = simple(per_tensor(2))
    scale, zero = (
        b.const("o_scale", torch.full((1, 1), 0.02)),
        b.const("o_zero", torch.tensor([[2**32]])),
    )
    program = b.done(b.call(ops.quantize, y, scale, zero, str(per_tensor(2))))
    low = lowered(program)

    calls = [n.target for n in low.graph.nodes if n.op == "call_function"]
    assert torch.ops.qfuse.linear_w8a8.default in calls
    for new, old in pairs(program, low, m=4):
        assert torch.equal(new, old)


def test_refuses_when_there_is_no_library() -> None:
    b, y = simple(per_tensor(2))
    assert why_not(lowered(b.done(y), NO_KERNELS), NAME) == "switched off by the test"
