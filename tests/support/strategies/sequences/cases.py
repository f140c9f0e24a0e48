"""Random graphs of sequences, as they are captured."""

from __future__ import annotations

import copy

import torch
from hypothesis import assume
from hypothesis import strategies as st
from tests.support.captured_case import MOST_IDS, CapturedCase
from tests.support.strategies.quant_specs import SEEDS
from tests.support.strategies.sequences.grower import SequenceGrower
from tests.support.strategies.sequences.steps import block, grow
from torch.fx import GraphModule, Node

from qfuse.ir.graph.stage_graph import CapturedGraph

aten = torch.ops.aten

_SYMBOLS = {"m": [3, 1, 7], "n": [2, 5, 1]}


@st.composite
def sequence_cases(draw: st.DrawFn) -> CapturedCase:
    """A random graph: a sequence, a few steps, and as outputs what nothing reads, and some others."""
    g = SequenceGrower(draw, False, draw(st.integers(0, 4)) == 4)
    _entry(g)
    if not g.chance(4):
        block(g)
    for _ in range(draw(st.sampled_from([1, 2, 3, 0, 4]))):
        grow(g)
    outs = [v.node for v in g.values if not v.node.users]
    others = [v.node for v in g.values] + g.results
    outs += [g.pick(others[::-1]) for _ in range(draw(st.integers(0, 2)) // 2)]
    program = g.done(*outs, stage=CapturedGraph)
    first, second = (
        {name: draw(st.sampled_from(known)) for name, known in _SYMBOLS.items()} for _ in range(2)
    )
    return CapturedCase(program, (first, second), exact=False, seed=draw(SEEDS))


def _entry(g: SequenceGrower) -> None:
    named: list[int | str] = ["m", "n"] if g.symbolic else []
    rank = g.pick([3, 2, 4])
    lead = [g.pick([*named, 3, 2, 1, 5]) for _ in range(rank - 1)]
    size = g.pick([8, 16, 4, 12, 5, 33])
    real = g.pick([torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16])
    if g.chance(5) and rank < 4:
        g.add(_looked_up(g, lead, size, real))
    else:
        g.add(g.arg("x", real, [*lead, size]))


def _looked_up(g: SequenceGrower, lead: list[int | str], size: int, real: torch.dtype) -> Node:
    """Rows of a quantized table."""
    ids = g.arg("ids", torch.int64, lead)
    stored = torch.randint(-127, 128, (MOST_IDS, size), generator=g.random).to(torch.int8)
    table = g.b.const(g.name("table"), stored)
    scale = g.scale((MOST_IDS, 1), real)
    if g.draw_bool():
        wide = g.call(aten._to_copy.default, table, dtype=real)
        return g.call(aten.embedding.default, g.call(aten.mul.Tensor, wide, scale), ids)
    rows = g.call(aten._to_copy.default, g.call(aten.embedding.default, table, ids), dtype=real)
    return g.call(aten.mul.Tensor, rows, g.call(aten.embedding.default, scale, ids))


@st.composite
def sequence_modules(draw: st.DrawFn) -> tuple[CapturedCase, GraphModule]:
    """A random graph, and the module that it is of."""
    case = draw(sequence_cases())
    assume(not case.undefined())
    module = GraphModule(case.program.module, copy.deepcopy(case.program.graph))
    return case, module.eval()
