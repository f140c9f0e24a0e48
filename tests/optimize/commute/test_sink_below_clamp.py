from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.propagate import Graph, applied, only_miss, priced, spec_of, steps

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.spec import QuantSpec
from qfuse.optimize.propagate.sink_dequantize import SinkDequantize
from qfuse.optimize.schedule import move
from qfuse.testing.quant import QuantizedLinear

aten = torch.ops.aten


def dequantized(g: Graph, scale: Any, zero: Any, spec: QuantSpec) -> Any:
    """A dequantize of quantized values of every value."""
    q = g.b.arg("q", spec.dtype, 16, 33)
    shape = (1, 1)
    made = scale if isinstance(scale, torch.Tensor) else torch.full(shape, scale)
    stored = zero if isinstance(zero, torch.Tensor) else torch.full(shape, zero, dtype=torch.int32)
    params = g.constant(made, "scale"), g.constant(stored, "zero")
    return g.dequantize(q, spec, params)


SPEC = spec_of(None, None)


@pytest.mark.numeric
def test_golden_the_zero_point_is_the_bound() -> None:
    g = Graph(1)
    program = g.done(g.call(aten.relu.default, dequantized(g, 0.1, -7, SPEC)))

    assert applied(program, SinkDequantize).fired == {"sink-dequantize": 1}
    assert steps(program) == ["clamp[16, 33]", "dequantize[16, 33]", "neg[16, 33]"]
    (cut,) = [n for n in program.graph.nodes if n.target is aten.clamp.default]
    assert cut.args[1:] == (-7, None)
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[1]
%q: int8[16, 33]
const %scale1: float32[1, 1]
const %zero2: int32[1, 1]
%0 = aten.clamp(%q, -7, None): int8[16, 33]
%1 = qfuse.dequantize(%0, %scale1, %zero2, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): float32[16, 33]
%2 = aten.neg(%1): float32[16, 33]
return (%2)""",
    )


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16], ids=str)
@pytest.mark.parametrize("float_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.relu.default, ()),
        (aten.relu6.default, ()),
        (aten.hardtanh.default, ()),
        (aten.clamp.default, (-0.25, 0.75)),
        (aten.clamp.default, (None, 0.5)),
        (aten.clamp_min.default, (-1.0,)),
        (aten.clamp_max.default, (0,)),
        (aten.clamp.default, (0.5, -0.125)),
    ],
    ids=str,
)
def test_bounds_that_are_stored(
    dtype: torch.dtype, float_dtype: torch.dtype, op: Any, args: tuple[Any, ...]
) -> None:
    g = Graph(1)
    # Multiples of the scale, which is a power of two, are stored.
    spec = spec_of(None, None, dtype=dtype, float_dtype=float_dtype)
    program = g.done(g.call(op, dequantized(g, 0.0625, 3, spec), *args))

    assert applied(program, SinkDequantize).fired == {"sink-dequantize": 1}


@pytest.mark.numeric
@pytest.mark.parametrize("zero", [0, -5])
def test_a_clamp_that_cuts_nothing_off_goes(zero: int) -> None:
    g = Graph(1)
    spec = spec_of(None, None, dtype=torch.uint8)
    program = g.done(g.call(aten.relu.default, dequantized(g, 0.1, zero, spec)))

    applied(program, SinkDequantize)
    assert steps(program) == ["dequantize[16, 33]", "neg[16, 33]"]


@pytest.mark.numeric
def test_blocks_with_one_zero_point() -> None:
    g = Graph(1)
    scale = torch.rand(1, 33) + 0.01
    x = dequantized(g, scale, torch.full((1, 33), 5), spec_of(None, 1))
    program = g.done(g.call(aten.relu.default, x))

    assert applied(program, SinkDequantize).fired == {"sink-dequantize": 1}


@pytest.mark.numeric
def test_a_linear_reads_what_was_rectified_as_stored_numbers() -> None:
    g = Graph(1)
    x = dequantized(g, 0.1, 5, SPEC)
    y = g.call(aten.relu.default, x)
    program = g.done(QuantizedLinear(g.b, 4, 33).linear(y), x)

    assert applied(program, SinkDequantize).fired == {"sink-dequantize": 1}


@pytest.mark.numeric
def test_a_rectifier_between_quantizes_of_one_scale_is_a_range() -> None:
    g = Graph(16, 33)
    params = g.params(g.x, SPEC, 0.1)
    x = g.dequantize(g.quantize(g.x, SPEC, params), SPEC, params)
    y = g.call(aten.relu.default, x)
    program = g.done(g.dequantize(g.quantize(y, SPEC, params), SPEC, params))

    move(program, priced())
    assert steps(program) == ["quantize[16, 33]", "dequantize[16, 33]", "neg[16, 33]"]
    (q,) = [n for n in program.graph.nodes if n.target is ops.quantize]
    zero = int(program.module.get_buffer(str(params[1].target)))
    assert QuantSpec.parse(q.args[3]).quant_min == zero


def test_refuses_a_bound_that_is_not_stored() -> None:
    g = Graph(1)
    y = g.call(aten.clamp_min.default, dequantized(g, 0.1, 3, SPEC), 0.123)

    miss = only_miss(g.done(y), SinkDequantize)
    assert (miss.code, miss.at) == (MissCode.ZERO_POINT, y)


def test_refuses_zero_points_that_differ() -> None:
    g = Graph(1)
    zero = torch.arange(33).reshape(1, 33)
    y = g.call(aten.relu.default, dequantized(g, torch.rand(1, 33) + 0.1, zero, spec_of(None, 1)))

    assert only_miss(g.done(y), SinkDequantize).code is MissCode.ZERO_POINT


def test_refuses_parameters_of_run_time() -> None:
    g = Graph(16, 33)
    params = g.choose(g.x, (None, None))
    x = g.dequantize(g.quantize(g.x, SPEC, params), SPEC, params)

    miss = only_miss(g.done(g.call(aten.relu.default, x)), SinkDequantize)
    assert (miss.code, miss.at) == (MissCode.NOT_CONSTANT, params[0])


def test_refuses_a_dequantize_that_something_else_reads() -> None:
    g = Graph(1)
    x = dequantized(g, 0.1, 3, SPEC)
    program = g.done(g.call(aten.relu.default, x), x)

    miss = only_miss(program, SinkDequantize)
    assert (miss.code, miss.at) == (MissCode.SHARED, x)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn], ids=str)
def test_refuses_storage_of_too_many_numbers(dtype: torch.dtype) -> None:
    g = Graph(1)
    spec = QuantSpec(dtype, -100, 100, (None, None))
    y = g.call(aten.relu.default, dequantized(g, 0.1, 0, spec))

    assert only_miss(g.done(y), SinkDequantize).code is MissCode.DTYPE


@pytest.mark.parametrize("scale", [-0.1, float("nan"), float("inf")])
def test_refuses_scales_that_keep_no_order(scale: float) -> None:
    g = Graph(1)
    y = g.call(aten.relu.default, dequantized(g, scale, 3, SPEC))

    assert only_miss(g.done(y), SinkDequantize).code is MissCode.RANGE
