from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.convolution_regions import SPEC, ConvolutionBoard
from tests.support.values import bits_same

from qfuse.ir.events import MissCode
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import OptimizedGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.convolution import as_fused_convolution
from qfuse.ir.ops.views import QuantParams
from qfuse.ir.quant.spec import QuantSpec, ZeroPointDomain
from qfuse.optimize.fuse.convolution_pad import FusePad
from qfuse.rewrite.clone import clone
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Miss
from qfuse.testing.fixed_order import run_fixed_order
from qfuse.testing.run import random_inputs

aten = torch.ops.aten


def padded(pads: list[int], value: float = 0, zero: torch.Tensor | None = None) -> OptimizedGraph:
    """A convolution with a padding of 1, of a padded activation."""
    board = ConvolutionBoard()
    point = None if zero is None else board.b.const("zero", zero)
    q = board.call(ops.quantize, board.image(2, 6, 6), board.scale(), point, str(SPEC))
    return board.done(
        board.conv(board.call(aten.constant_pad_nd.default, q, pads, value), zero=point)
    )


def miss_of(program: OptimizedGraph) -> Miss:
    """Return why the rule does not fire."""
    *_, node = program.graph.find_nodes(op="call_function", target=ops.convolution)
    found = FusePad().match(node)
    assert isinstance(found, Miss)
    return found


def test_golden_the_padding_is_added() -> None:
    program = padded([1, 1, 2, 2])

    assert apply_rules(program, [FusePad()]).fired == {"fuse-pad": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[2, 4, 6, 6]
const %s: float32[1, 1, 1, 1]
%0 = qfuse.quantize(%x, %s, None, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int'): int8[2, 4, 6, 6]
const %w1: int8[8, 4, 3, 3]
const %w1_s: float32[1, 1, 1, 1]
const %s: float32[1, 1, 1, 1]
const %s: float32[1, 1, 1, 1]
%1 = qfuse.convolution(%0, %s, None, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int', %w1, %w1_s, None, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int', None, (1, 1), (3, 2), (1, 1), False, (0, 0), 1, %s, None, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int', '', ()): int8[2, 8, 10, 8]
return (%1)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("pads", "padding"),
    [
        ([1, 1, 1, 1], (2, 2)),
        ([2, 2], (1, 3)),
        ([0, 0, 3, 3, 0, 0], (4, 1)),
        ([0, 1, 0, 1], (1, 1, 2, 2)),
        ([3, 0], (1, 4, 1, 1)),
        ([0, 2, 1, 1], (2, 1, 2, 3)),
    ],
)
def test_the_padding_is_added(pads: list[int], padding: tuple[int, ...]) -> None:
    program = padded(pads)
    source = clone(program)

    assert apply_rules(program, [FusePad()]).fired == {"fuse-pad": 1}
    (node,) = program.graph.find_nodes(op="call_function", target=ops.convolution)
    fused = as_fused_convolution(node)
    assert fused is not None
    assert fused.padding == padding
    assert is_call(fused.x, ops.quantize)
    inputs = random_inputs(source)
    assert bits_same(run_fixed_order(program, inputs), run_fixed_order(source, inputs))


@pytest.mark.numeric
def test_uneven_paddings_are_added_up() -> None:
    board = ConvolutionBoard()
    q = board.quantize(board.image(2, 6, 6))
    for pads in ([0, 1, 2, 0], [1, 0], [1, 1]):
        q = board.call(aten.constant_pad_nd.default, q, pads, 0)
    program = board.done(board.conv(q))
    source = clone(program)

    assert apply_rules(program, [FusePad()]).fired == {"fuse-pad": 3}
    (node,) = program.graph.find_nodes(op="call_function", target=ops.convolution)
    fused = as_fused_convolution(node)
    assert fused is not None
    assert fused.sides == ((3, 1), (3, 3))
    inputs = random_inputs(source)
    assert bits_same(run_fixed_order(program, inputs), run_fixed_order(source, inputs))


def test_the_value_is_the_zero_point() -> None:
    zero = torch.full((1, 1, 1, 1), -5, dtype=torch.int32)

    assert apply_rules(padded([1, 1, 1, 1], -5, zero), [FusePad()]).fired == {"fuse-pad": 1}
    miss = miss_of(padded([1, 1, 1, 1], 0, zero))
    assert "it pads with 0, but -5 stands for 0" in str(miss)


@pytest.mark.parametrize(
    ("pads", "why"),
    [
        ([1, 1, 1, 1, 2, 2], "channels or images are padded too"),
        ([-1, -1], "not made of sizes to add"),
    ],
)
def test_refuses_other_paddings(pads: list[int], why: str) -> None:
    miss = miss_of(padded(pads))
    assert miss.code is MissCode.ARGUMENT
    assert why in str(miss)


def test_refuses_a_value_that_is_not_zero() -> None:
    assert "it pads with 3, but 0 stands for 0" in str(miss_of(padded([1, 1], 3)))


def test_refuses_an_activation_without_a_padding() -> None:
    board = ConvolutionBoard()
    program = board.done(board.conv(board.quantize(board.image())))

    miss = miss_of(program)
    assert miss.code is MissCode.PATTERN
    # Most convolutions have none, so the report does not show it.
    assert miss.progress == 0


@pytest.mark.parametrize("zero", [float("nan"), 2.5])
def test_refuses_a_zero_point_that_is_not_an_integer(zero: float) -> None:
    miss = miss_of(padded([1, 1], 2, torch.full((1, 1, 1, 1), zero)))
    assert miss.code is MissCode.ZERO_POINT
    assert "not one constant integer" in str(miss)


def altered(spec: QuantSpec, scale: torch.Tensor) -> OptimizedGraph:
    """A convolution of a padded activation with other parameters."""
    board = ConvolutionBoard()
    q = board.b.arg("q", torch.int8, 2, 4, 6, 6)
    y = board.conv(board.call(aten.constant_pad_nd.default, q, [1, 1], 0))
    fused = as_fused_convolution(y)
    assert fused is not None
    params = QuantParams(spec, board.b.const("other", scale), None)
    return board.done(board.call(ops.convolution, *replace(fused, x_params=params).call_args()))


def test_refuses_scales_along_a_padded_axis() -> None:
    miss = miss_of(altered(SPEC.with_block((None, None, None, 1)), torch.ones(1, 1, 1, 8)))
    assert miss.code is MissCode.GRANULARITY


def test_refuses_a_float_offset() -> None:
    spec = replace(SPEC, domain=ZeroPointDomain.FLOAT_OFFSET)
    miss = miss_of(altered(spec, torch.ones(1, 1, 1, 1)))
    assert miss.code is MissCode.ZERO_POINT
    assert "float offset" in str(miss)


def test_refuses_a_negative_zero_before_floats() -> None:
    """The sum of negative zeros is one; a convolution pads with positive ones."""
    board = ConvolutionBoard()
    y = board.conv(board.call(aten.constant_pad_nd.default, board.image(2, 6, 6), [1, 1], -0.0))
    fused = as_fused_convolution(y)
    assert fused is not None
    program = board.done(board.call(ops.convolution, *replace(fused, x_params=None).call_args()))
    assert miss_of(program).code is MissCode.ARGUMENT
