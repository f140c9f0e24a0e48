"""Images of quantized values times a gate that broadcasts to their pixels, as in squeeze-excite."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.gated import epilogues, fused, stored
from tests.support.cases.propagate import Graph, spec_of
from torch.fx import Node

from qfuse.ir.graph.text import to_text
from qfuse.ir.ops.activation import as_activation
from qfuse.ir.ops.epilogue import Mul
from qfuse.rewrite.prelude import aten

pytestmark = pytest.mark.numeric

TENSOR = (None, None, None, None)


def image(g: Graph, shape: tuple[int | str, ...] = ("n", 6, "h", "w")) -> Node:
    """An image of quantized values."""
    spec = spec_of(*(None,) * len(shape))
    q = g.b.arg("q", torch.int8, *shape)
    return g.dequantize(q, spec, g.params(q, spec))


def test_golden_the_quantized_values_are_read() -> None:
    g = Graph("n", 6, 1, 1)
    program = g.done(stored(g, g.call(aten.mul.Tensor, image(g), g.x)))

    assert fused(program, n=2, h=3, w=4).fired == {"fuse-activation-quantize": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 6, 1, 1]
%q: int8[s0, 6, s1, s2]
const %scale1: float32[1, 1, 1, 1]
const %zero2: int32[1, 1, 1, 1]
const %scale3: float32[1, 1, 1, 1]
const %zero4: int32[1, 1, 1, 1]
%0 = qfuse.activation(%q, %scale1, %zero2, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int', 'mul(0)', (%x), %scale3, %zero4, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int', '', ''): (int8[s0, 6, s1, s2])
%1 = getitem(%0, 0): int8[s0, 6, s1, s2]
%2 = qfuse.dequantize(%1, %scale3, %zero4, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int'): float32[s0, 6, s1, s2]
%3 = aten.neg(%2): float32[s0, 6, s1, s2]
return (%3)""",
    )


@pytest.mark.parametrize("gate", [("n", 6, 1, 1), (1, 6, 1, 1), (6, 1, 1), ("n", 1, 1, 1)], ids=str)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("how", ["static", "dynamic", "channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_stay(gate: tuple[int | str, ...], first: bool, how: str, dtype: torch.dtype) -> None:
    g = Graph(*gate, dtype=dtype)
    q = image(g, ("n", 6, 5, 4))
    product = g.call(aten.mul.Tensor, *((g.x, q) if first else (q, g.x)))
    program = g.done(stored(g, product, how))

    assert fused(program, n=3).fired == {"fuse-activation-quantize": 1}
    assert epilogues(program) == ["mul(0)"]


@pytest.mark.parametrize(
    ("shape", "gate"),
    [
        ((2, 6, 7), (2, 6, 1)),
        ((2, 6, 2, 3, 4), (2, 6, 1, 1, 1)),
        ((6, 5, 4), (6, 1, 1)),
        ((1, 1, 5, 4), (1, 1, 1, 1)),
        ((2, 6, 1, 1), (2, 6, 1, 1)),
        ((0, 6, 5, 4), (0, 6, 1, 1)),
    ],
    ids=str,
)
def test_other_ranks_and_odd_sizes(shape: tuple[int, ...], gate: tuple[int, ...]) -> None:
    g = Graph(*gate)
    program = g.done(stored(g, g.call(aten.mul.Tensor, image(g, shape), g.x)))

    assert fused(program).fired == {"fuse-activation-quantize": 1}


def test_a_gate_of_quantized_values_and_a_product_with_other_users() -> None:
    g = Graph("n", 6, 1, 1)
    spec = spec_of(*TENSOR)
    params = g.params(g.x, spec)
    gate = g.dequantize(g.quantize(g.x, spec, params), spec, params)
    product = g.call(aten.mul.Tensor, image(g, ("n", 6, 5, 4)), gate)
    program = g.done(stored(g, product), product)

    assert fused(program, n=2).fired == {"fuse-activation-quantize": 1}
    (found,) = filter(None, map(as_activation, program.graph.nodes))
    (product_op,) = found.epilogue.ops
    assert isinstance(product_op, Mul)
    assert product_op.stored is not None
    assert found.output.extra_outputs_text == "float"


def test_an_image_that_gates_itself() -> None:
    """The pool, the gate and the product read one image, whose dequantize stays for the pool."""
    g = Graph("n", 6, 1, 1)
    x = image(g, ("n", 6, 5, 4))
    gate = g.call(aten.sigmoid.default, g.call(aten.mean.dim, x, [2, 3], True))
    program = g.done(stored(g, g.call(aten.mul.Tensor, gate, x)))

    assert fused(program, n=2).fired == {"fuse-activation-quantize": 1}
    (found,) = filter(None, map(as_activation, program.graph.nodes))
    assert found.x_params is not None


def test_a_channels_last_image_keeps_its_strides() -> None:
    g = Graph("n", 6, 1, 1)
    spec = spec_of(*TENSOR)
    q = g.b.arg("q", torch.int8, "n", 6, 5, 4, order=(0, 2, 3, 1))
    x = g.dequantize(q, spec, g.params(q, spec))
    program = g.done(stored(g, g.call(aten.mul.Tensor, x, g.x)))

    assert fused(program, n=2).fired == {"fuse-activation-quantize": 1}


def test_leaves_an_image_that_is_not_quantized() -> None:
    g = Graph("n", 6, 5, 4)
    gate = g.b.arg("g", torch.float32, "n", 6, 1, 1)
    program = g.done(stored(g, g.call(aten.mul.Tensor, g.x, gate)))

    assert not fused(program, n=2).modified


@pytest.mark.parametrize("gate", [("n", 6, 5, 4), ("n", 6, 1, 4), (4,), (1,), ()], ids=str)
def test_leaves_factors_that_are_no_gates(gate: tuple[int | str, ...]) -> None:
    g = Graph(*gate)
    program = g.done(stored(g, g.call(aten.mul.Tensor, image(g, ("n", 6, 5, 4)), g.x)))

    assert not fused(program, n=2).modified


def test_leaves_a_gate_that_is_larger_than_the_image() -> None:
    g = Graph("n", 6, 5, 1)
    program = g.done(stored(g, g.call(aten.mul.Tensor, image(g, ("n", 6, 1, 4)), g.x)))

    assert not fused(program, n=2).modified


def test_leaves_an_integer_gate() -> None:
    g = Graph("n", 6, 5, 4, dtype=torch.float32)
    gate = g.b.arg("g", torch.int32, "n", 6, 1, 1)
    spec = spec_of(*TENSOR)
    x = g.dequantize(g.quantize(g.x, spec, params := g.params(g.x, spec)), spec, params)
    program = g.done(stored(g, g.call(aten.mul.Tensor, x, gate)))

    assert not fused(program, n=2).modified
