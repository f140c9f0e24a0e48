from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.propagate import Graph, applied, only_miss, spec_of, steps

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.optimize.propagate.sink_dequantize import SinkDequantize

aten = torch.ops.aten
pad = aten.constant_pad_nd.default


def padded(
    value: float, scale: float = 0.5, zero: int | None = 3, float_dtype: torch.dtype = torch.float32
) -> Graph:
    """A padding of a dequantize, read by nobody yet."""
    g = Graph(1)
    spec = spec_of(None, None, low=-100, float_dtype=float_dtype)
    zero_point = None if zero is None else g.constant(torch.tensor([[zero]]), "zero")
    params = g.constant(torch.tensor([[scale]]), "scale"), zero_point
    g.x = g.call(pad, g.dequantize(g.stored(2, 6), spec, params), [1, 2, 0, 1], value)
    return g


@pytest.mark.numeric
def test_golden_zeros_are_the_zero_point() -> None:
    g = padded(0.0)
    program = g.done(g.x)

    assert applied(program, SinkDequantize).fired == {"sink-dequantize": 1}
    assert steps(program) == ["constant_pad_nd[3, 9]", "dequantize[3, 9]", "neg[3, 9]"]
    (made,) = [n for n in program.graph.nodes if n.target is pad]
    assert made.args[2] == 3
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[1]
const %zero1: int64[1, 1]
const %scale2: float32[1, 1]
%q3: int8[2, 6]
%0 = aten.constant_pad_nd(%q3, (1, 2, 0, 1), 3): int8[3, 9]
%1 = qfuse.dequantize(%0, %scale2, %zero1, 'int8[-100,127] *x* float32 float32:reciprocal:round-zp int'): float32[3, 9]
%2 = aten.neg(%1): float32[3, 9]
return (%2)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("value", [-1.5, 2.0, 10.0])
@pytest.mark.parametrize("zero", [None, 3])
@pytest.mark.parametrize("float_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_that_are_stored(value: float, zero: int | None, float_dtype: torch.dtype) -> None:
    g = padded(value, zero=zero, float_dtype=float_dtype)

    assert applied(g.done(g.x), SinkDequantize).fired == {"sink-dequantize": 1}


@pytest.mark.parametrize("value", [0.25, -0.0, 1e3, -52.0])
def test_refuses_numbers_that_are_not_stored(value: float) -> None:
    g = padded(value)

    assert only_miss(g.done(g.x), SinkDequantize).code is MissCode.ZERO_POINT


def test_refuses_several_blocks() -> None:
    g = Graph(1)
    q = g.stored(2, 6)
    spec = spec_of(1, None)
    program = g.done(g.call(pad, g.dequantize(q, spec, g.params(q, spec)), [1, 2], 0))

    assert only_miss(program, SinkDequantize).code is MissCode.GRANULARITY


def test_refuses_parameters_of_run_time() -> None:
    g = Graph(2, 6)
    spec = spec_of(None, None)
    params = g.choose(g.x, (None, None))
    program = g.done(
        g.call(pad, g.dequantize(g.quantize(g.x, spec, params), spec, params), [1, 2], 0)
    )

    assert only_miss(program, SinkDequantize).code is MissCode.NOT_CONSTANT


def test_refuses_a_dequantize_that_something_else_reads() -> None:
    g = padded(0.0)
    program = g.done(g.x, g.x.all_input_nodes[0])

    assert only_miss(program, SinkDequantize).code is MissCode.SHARED
