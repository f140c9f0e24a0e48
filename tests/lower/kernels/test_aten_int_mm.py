from __future__ import annotations

import pytest
import torch
from tests.support.cases.lowering import NO_KERNELS, lowered, pairs, the_kernel, why_not

from qfuse.ir.events import Exactness, Lowered
from qfuse.ir.ops import library as ops
from qfuse.rewrite.compare import compare
from qfuse.rewrite.tolerance import SITE
from qfuse.targets import KernelState, Target
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import QuantizedLinear, per_tensor

aten = torch.ops.aten
NAME = "aten._int_mm"


def symmetric(*shape: int | str, n: int = 40, k: int = 24) -> GraphBuilder:
    """A builder with one symmetric int8 linear; its output is the newest node."""
    b = GraphBuilder()
    x = b.arg("x", torch.float32, *shape, k)
    spec = per_tensor(len(shape) + 1)
    scale = b.const("scale", torch.rand([1] * spec.rank) * 0.02 + 1e-3)
    q = b.call(ops.quantize, x, scale, None, str(spec))
    real = b.call(ops.dequantize, q, scale, None, str(spec))
    QuantizedLinear(b, n, k).linear(real)
    return b


def last(b: GraphBuilder) -> torch.fx.Node:
    """The newest node."""
    node: torch.fx.Node = next(iter(reversed(b.graph.nodes)))
    return node


@pytest.mark.numeric
@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 1, 5)])
def test_values_at_every_rank(shape: tuple[int, ...]) -> None:
    b = symmetric(*shape)
    program = b.done(last(b))
    low = lowered(program, NO_KERNELS)

    assert the_kernel(low) == NAME
    for new, old in pairs(program, low):
        assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None


@pytest.mark.parametrize(("shape", "n", "k"), [((1,), 40, 24), (("m",), 40, 24), ((4,), 1, 24)])
def test_refuses_sizes_that_may_be_one(shape: tuple[int | str, ...], n: int, k: int) -> None:
    b = symmetric(*shape, n=n, k=k)
    low = lowered(b.done(last(b)), NO_KERNELS)

    assert the_kernel(low) == "expand"
    assert why_not(low, NAME) == "it returns garbage when a size is 1"


def test_what_runs_after_the_kernel_is_named() -> None:
    b = symmetric(4)
    (bare,) = lowered(b.done(last(b)), NO_KERNELS).log.of(Lowered)
    assert (bare.kernel, bare.why) == (NAME, "")

    b = symmetric(4)
    y = b.call(aten.gelu.default, last(b))
    spec = per_tensor(2)
    scale = b.const("out_scale", torch.full((1, 1), 0.05))
    q = b.call(ops.quantize, y, scale, None, str(spec))
    program = b.done(b.call(ops.dequantize, q, scale, None, str(spec)))
    (event,) = lowered(program, NO_KERNELS).log.of(Lowered)
    assert (event.kernel, event.why) == (NAME, "after the kernel: act(gelu) and quantize")


def test_an_activation_behind_the_kernel_takes_time() -> None:
    predicted: dict[torch._ops.OpOverload | None, float] = {}
    for act in (None, aten.relu.default, aten.gelu.default):
        b = symmetric(512, n=1024, k=256)
        y = last(b) if act is None else b.call(act, last(b))
        (event,) = lowered(b.done(y), NO_KERNELS).log.of(Lowered)
        assert event.kernel == NAME
        assert event.predicted is not None
        predicted[act] = event.predicted

    # A loop that multiplies by the scales is there in any case.
    assert predicted[aten.relu.default] == predicted[None]
    assert predicted[aten.gelu.default] > 1.2 * predicted[None]


@pytest.mark.numeric
def test_values_of_rows_that_are_expanded() -> None:
    b = GraphBuilder()
    q = b.call(aten.expand.default, b.arg("q", torch.int8, 1, 24), (6, 24))
    scale = b.const("scale", torch.full((1, 1), 0.01))
    real = b.call(ops.dequantize, q, scale, None, str(per_tensor(2)))
    program = b.done(QuantizedLinear(b, 40, 24).linear(real))
    low = lowered(program, NO_KERNELS)

    assert the_kernel(low) == NAME
    for new, old in pairs(program, low):
        assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None


@pytest.mark.parametrize(("k", "taken"), [((1 << 17) - 1, True), (1 << 17, False)])
def test_refuses_sums_that_32_bits_cannot_hold(k: int, taken: bool) -> None:
    b = symmetric(4, n=2, k=k)
    low = lowered(b.done(last(b)), NO_KERNELS)

    assert (the_kernel(low) == NAME) is taken
    if not taken:
        assert why_not(low, NAME) == "131072 input features could overflow its sums"


def test_refuses_a_zero_point() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4, 24)
    block = QuantizedLinear(b, 40, 24)
    low = lowered(b.done(block.linear(block.quantized(x, per_tensor(2)))), NO_KERNELS)

    assert why_not(low, NAME) == "the activation has a zero point"


@pytest.mark.parametrize(
    "target",
    [
        Target.for_testing(kernels={"aten::_int_mm": KernelState.SCHEMA_ONLY}),
        Target.for_testing(features=frozenset({"avx2"})),
        Target.for_testing(onednn_isa_limit="AVX2"),
    ],
    ids=["schema-only", "no-vnni", "limited"],
)
def test_refuses_platforms_where_it_is_missing_or_saturates(target: Target) -> None:
    b = symmetric(4)
    low = lowered(b.done(last(b)), NO_KERNELS, target)

    assert the_kernel(low) == "expand"
