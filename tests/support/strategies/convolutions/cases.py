"""Random graphs of convolutions, as they are captured, with what they are run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from tests.support.strategies.convolutions.grower import ImageGrower, hint
from tests.support.strategies.convolutions.steps import block, grow
from tests.support.strategies.convolutions.weights import Weights
from tests.support.strategies.quant_specs import SEEDS
from torch.fx import Node

from qfuse.ir.graph.stage_graph import CapturedGraph, InputSpec
from qfuse.ir.graph.text import to_text

_LEAST_IMAGE = 2
_SPATIAL = {1: [12, 9, 17], 2: [8, 7, 9], 3: [5, 6, 4]}
# Not below the sizes of the trace, at which every window fits.
_SYMBOLS = {"n": [2, 1, 5], "h": [9, 11, 10], "w": [11, 9, 10]}


@dataclass(frozen=True)
class ConvCase:
    """A random graph and the inputs that it is run on.

    Attributes:
        program: The graph.
        sizes: Values of its symbolic sizes, for a first and a second input.
        exact: Whether every sum in it is exact.
        seed: Of the inputs.
    """

    program: CapturedGraph
    sizes: tuple[Mapping[str, int], Mapping[str, int]]
    exact: bool
    seed: int

    def __repr__(self) -> str:
        text = to_text(self.program.graph)
        return f"ConvCase(exact={self.exact}, sizes={self.sizes}, seed={self.seed}):\n{text}\n"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Hypothesis prints dataclasses field by field unless they say otherwise."""
        del cycle
        printer.text(repr(self))

    @property
    def ambiguous(self) -> bool:
        """Whether the layout of a value may be taken for two.

        Torch tells channels-last by the strides, also by those of axes of size one. Ops that compute
        element by element drop these, and their fake versions do not.
        """
        computed: set[Node] = set()
        for node in self.program.graph.nodes:
            if node.op == "placeholder" or computed & set(node.all_input_nodes):
                computed.add(node)
        values = [node.meta.get("val") for node in computed]
        shapes = [list(map(hint, v.shape)) for v in values if isinstance(v, torch.Tensor)]
        return any(1 in shape[1:] for shape in shapes if len(shape) > _LEAST_IMAGE)

    def inputs(self, which: int = 0) -> list[torch.Tensor]:
        """The first or the second input, the same one every time."""
        random = torch.Generator().manual_seed(self.seed + which)
        return [
            draw_input(spec, self.sizes[which], random, exact=self.exact)
            for spec in self.program.signature.inputs
        ]


def draw_input(
    spec: InputSpec, sizes: Mapping[str, int], random: torch.Generator, *, exact: bool
) -> torch.Tensor:
    """A tensor for an input, in its layout; a multiple of 1/8 if sums must be exact."""
    shape = [size if isinstance(size, int) else sizes[size] for size in spec.shape]
    dtype = spec.dtype
    assert dtype is not None, "every input is a tensor"
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        value = torch.randint(info.min, info.max + 1, shape, generator=random)
    elif exact:
        value = torch.randint(-127, 128, shape, generator=random) / 8
    else:
        value = torch.randn(shape, generator=random)
    order = spec.order or tuple(range(len(shape)))
    stored = torch.empty([shape[axis] for axis in order], dtype=dtype)
    # Also the strides of axes of size one are those of the layout: torch looks at them.
    return stored.permute([order.index(axis) for axis in range(len(order))]).copy_(value)


@st.composite
def conv_cases(draw: st.DrawFn, *, exact: bool) -> ConvCase:
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
    program = g.b.done(*outs, stage=CapturedGraph)
    return ConvCase(program, (first, second), exact, draw(SEEDS))


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
