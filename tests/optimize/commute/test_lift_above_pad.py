from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.propagate import Graph, applied, only_miss, spec_of, steps

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.optimize.propagate.lift_quantize import LiftQuantize

aten = torch.ops.aten
pad = aten.constant_pad_nd.default


@pytest.mark.numeric
def test_golden_the_padding_is_a_stored_number() -> None:
    g = Graph(2, 6)
    spec = spec_of(None, None)
    scale = g.constant(torch.tensor([[0.5]]), "scale")
    zero = g.constant(torch.tensor([[3]]), "zero")
    program = g.done(g.quantize(g.call(pad, g.x, [1, 2], -1.0), spec, (scale, zero)))

    assert applied(program, LiftQuantize).fired == {"lift-quantize": 1}
    assert steps(program)[:2] == ["quantize[2, 6]", "constant_pad_nd[2, 9]"]
    (made,) = [n for n in program.graph.nodes if n.target is pad]
    assert made.args[2] == 1
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[2, 6]
const %scale1: float32[1, 1]
const %zero2: int64[1, 1]
%0 = qfuse.quantize(%x, %scale1, %zero2, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): int8[2, 6]
%1 = aten.constant_pad_nd(%0, (1, 2), 1): int8[2, 9]
%2 = qfuse.dequantize(%1, %scale1, %zero2, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): float32[2, 9]
%3 = aten.neg(%2): float32[2, 9]
return (%3)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("value", [0, -0.0, 0.013, -5.5, 1e6])
@pytest.mark.parametrize("pads", [[1, 2], [0, 0, 2, 1], [-1, 2], [1, 1, -1, 0]], ids=str)
@pytest.mark.parametrize("float_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_number_can_be_stored(value: float, pads: list[int], float_dtype: torch.dtype) -> None:
    g = Graph(2, 6, dtype=float_dtype)
    padded = g.call(pad, g.x, pads, value)
    spec = spec_of(None, None, dtype=torch.uint8, float_dtype=float_dtype)
    program = g.done(g.quantize(padded, spec, g.params(padded, spec)))

    assert applied(program, LiftQuantize).fired == {"lift-quantize": 1}


@pytest.mark.numeric
def test_rows_that_are_not_padded_keep_their_scales() -> None:
    g = Graph(2, 6)
    padded = g.call(pad, g.x, [1, 2], 0)
    spec = spec_of(1, None)
    scale = g.constant(torch.tensor([[0.1], [0.2]]), "scale")
    program = g.done(g.quantize(padded, spec, (scale, None)))

    assert applied(program, LiftQuantize).fired == {"lift-quantize": 1}


def refused(spec: Any, scale: torch.Tensor, value: float = 0.0) -> MissCode:
    """Why a padding of the last axis is not crossed."""
    g = Graph(2, 6)
    padded = g.call(pad, g.x, [1, 2], value)
    program = g.done(g.quantize(padded, spec, (g.constant(scale, "scale"), None)))
    return only_miss(program, LiftQuantize).code


def test_refuses_blocks_along_the_padded_axis() -> None:
    assert refused(spec_of(None, 3), torch.rand(1, 3) + 0.1) is MissCode.GRANULARITY


def test_refuses_blocks_that_store_the_padding_in_two_ways() -> None:
    scale = torch.tensor([[0.1], [0.2]])
    assert refused(spec_of(1, None), scale, value=1.0) is MissCode.GRANULARITY


def test_refuses_parameters_of_run_time() -> None:
    g = Graph(2, 6)
    padded = g.call(pad, g.x, [1, 2], 0)
    spec = spec_of(None, None)
    program = g.done(g.quantize(padded, spec, g.choose(padded, (None, None))))

    assert only_miss(program, LiftQuantize).code is MissCode.NOT_CONSTANT
