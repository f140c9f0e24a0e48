"""Splits that sink below quantizes, by their parameters, and values that many read."""

from __future__ import annotations

import pytest
import torch
from tests.support.cases.mx_linear import nv, params
from tests.support.cases.propagate import Graph, priced, spec_of, steps
from tests.support.cases.splits import matmuls, parts, sunk

from qfuse.ir.ops import library as ops
from qfuse.optimize.splits.sink_split import SinkSplit
from qfuse.rewrite.driver import apply_rules

aten = torch.ops.aten


@pytest.mark.numeric
@pytest.mark.parametrize("which", [0, 1], ids=["scale", "zero point"])
def test_parameters_of_each_part_quantize_no_more_than_it(which: int) -> None:
    g = Graph(4, 2)
    spec = spec_of(None, None)
    scale, zero = g.params(g.x, spec)
    made = []
    # Parts of one element along the axis have a scale that is one of them.
    for part in parts(g, 1, 1):
        row = g.call(aten.slice.Tensor, part, 0, 0, 1)
        own = g.call(aten.add.Scalar, g.call(aten.abs.default, row), 0.5)
        made.append(g.quantize(part, spec, (own, zero) if which == 0 else (scale, own)))
    program = g.done(*made)

    sunk(program)
    assert len([s for s in steps(program) if s.startswith("quantize")]) == 2


@pytest.mark.numeric
@pytest.mark.parametrize("whole", [True, False])
def test_second_level_scales_of_the_whole_axis_quantize_all_parts(whole: bool) -> None:
    g = Graph(4, 32)
    spec = nv(1, None, outer=(None, None if whole else 16))
    args = params(g, spec, 4, 16)
    made = [g.call(ops.quantize, part, *args) for part in parts(g, 16, 16)]
    program = g.done(*(g.call(ops.dequantize, q, *args) for q in made))

    assert sunk(program).modified is whole


def test_a_reader_in_memory_counts_however_many_read_before_it() -> None:
    g = Graph(64, 24)
    made = [g.call(aten.silu.default, part) for part in parts(g, 16, 8)]
    others = [g.call(aten.add.Tensor, x, n) for n in range(70) for x in made]
    program = g.done(*others, *matmuls(g, *made))

    assert apply_rules(program, [SinkSplit()], priced()).fired == {"sink-split": 1}
