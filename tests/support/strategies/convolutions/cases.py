"""Random graphs of convolutions, as they are captured."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from tests.support.captured_case import CapturedCase
from tests.support.strategies.convolutions.grower import ImageGrower
from tests.support.strategies.convolutions.steps import block, grow
from tests.support.strategies.convolutions.weights import Weights
from tests.support.strategies.quant_specs import SEEDS

from qfuse.ir.graph.stage_graph import CapturedGraph

_SPATIAL = {1: [12, 9, 17], 2: [8, 7, 9], 3: [5, 6, 4]}
# Not below the sizes of the trace, at which every window fits.
_SYMBOLS = {"n": [2, 1, 5], "h": [9, 11, 10], "w": [11, 9, 10]}


@st.composite
def conv_cases(draw: st.DrawFn, *, exact: bool) -> CapturedCase:
    """A random graph: an image, a few steps, and as outputs what nothing reads, and some others."""
    rank = draw(st.sampled_from([2, 2, 2, 1, 3]))
    batched = draw(st.integers(0, 5)) < 5
    symbolic = draw(st.integers(0, 5)) == 5
    g = ImageGrower(draw, exact, symbolic, rank=rank, batched=batched)
    _image(g)
    weights = Weights()
    block(g, weights)
    for _ in range(draw(st.sampled_from([0, 1, 2, 0, 1, 3]))):
        grow(g, weights)
    outs = [v.node for v in g.values if not v.node.users]
    others = [v.node for v in g.values] + g.quantized_values
    outs += [g.pick(others[::-1]) for _ in range(draw(st.integers(0, 2)) // 2)]
    first, second = (_sizes(draw) for _ in range(2))
    program = g.done(*outs, stage=CapturedGraph)
    return CapturedCase(program, (first, second), exact, draw(SEEDS))


def _sizes(draw: st.DrawFn) -> dict[str, int]:
    return {name: draw(st.sampled_from(known)) for name, known in _SYMBOLS.items()}


def _image(g: ImageGrower) -> None:
    lead: list[int | str] = []
    if g.batched:
        batches: list[int | str] = ["n", 2] if g.symbolic else [2, 1, 3]
        lead = [g.pick(batches)]
    sizes: list[int | str] = [g.pick(_SPATIAL[g.rank]) for _ in range(g.rank)]
    if g.symbolic and g.rank < 3 and g.chance(2):
        sizes = list(("h", "w")[: g.rank])
    channels = g.pick([4, 3, 8, 6, 1, 16])
    dtype = torch.float32 if g.exact else g.pick([torch.float32, torch.float32, torch.bfloat16])
    g.input([*lead, channels, *sizes], dtype)
