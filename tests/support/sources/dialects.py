"""Source graphs for the tests of dialects: built by hand, run before and after, compared by bits."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch.fx import Interpreter, Node

from qfuse.ir.events import Fired, Missed
from qfuse.ir.graph.stage_graph import CapturedGraph, NormalGraph, StageGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops.views import node_of
from qfuse.ir.quant.spec import dtype_range
from qfuse.normalize import normalize
from qfuse.normalize.importers.dialect import Dialect
from qfuse.normalize.importers.pt2e.dialect import DECOMPOSED
from qfuse.normalize.importers.torchao.dialect import TORCHAO_AFFINE
from qfuse.rewrite.context import RewriteContext
from qfuse.testing.build import GraphBuilder

# The ops of the two dialects exist once these are imported; a captured graph implies that.
importlib.import_module("torch.ao.quantization.fx._decomposed")
importlib.import_module("torchao.quantization.quant_primitives")

# Draws the data of an example, so that hypothesis can repeat it.
SEEDS = st.integers(0, 2**32 - 1)
DIALECTS = (DECOMPOSED, TORCHAO_AFFINE)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8, torch.int16)


@dataclass
class Source:
    """A source graph under construction, with the values of its inputs."""

    b: GraphBuilder = field(default_factory=GraphBuilder)
    inputs: list[torch.Tensor] = field(default_factory=list)
    symbols: tuple[str | int, ...] | None = None

    def arg(self, value: torch.Tensor, shape: Sequence[int | str] | None = None) -> Node:
        """Add an input with a value; sizes given as names are symbolic."""
        self.inputs.append(value)
        name = f"x{len(self.inputs)}"
        return self.b.arg(name, value.dtype, *(value.shape if shape is None else shape))

    def either(self, value: torch.Tensor, *, constant: bool) -> Node:
        """Add a constant or an input."""
        if constant:
            return self.b.const(f"c{len(self.b.graph.nodes)}", value)
        return self.arg(value)

    def done(self, *outs: Node) -> CapturedGraph:
        """Finish the graph."""
        return self.b.done(*outs, stage=CapturedGraph)


def run(program: StageGraph, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a graph as it stands."""
    program.module.recompile()
    with torch.no_grad():
        return list(Interpreter(program.module).run(*inputs))


def assert_same_bits(
    source: Source,
    *outs: Node,
    dialects: Sequence[Dialect] = DIALECTS,
    context: RewriteContext | None = None,
) -> NormalGraph:
    """Normalize and assert that every output has the bits, and the type, that it had."""
    program = source.done(*outs)
    before = run(program, source.inputs)
    text = to_text(program.graph)
    normal = normalize(program, context, dialects)
    after = run(normal, source.inputs)
    for old, new, node in zip(before, after, results(normal), strict=True):
        same = old.dtype == new.dtype and old.shape == new.shape and equal_but_for_nan(old, new)
        assert same, f"{text}\n-->\n{to_text(normal.graph)}\n{difference(old, new)}"
        assert node.meta["val"].dtype == new.dtype
        assert strides(node.meta["val"]) == strides(new)
    return normal


def strides(x: torch.Tensor) -> list[int]:
    """The strides that matter: those of axes along which there is a step to take."""
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if x.numel() and size > 1]


def equal_but_for_nan(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether two tensors have the same bits; which of the many NaNs one is, torch leaves open."""
    if not old.dtype.is_floating_point:
        return torch.equal(old, new)
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[old.element_size()]
    nan = old.float().isnan()
    bits = [t.contiguous().view(kind).masked_fill(nan, 0) for t in (old, new)]
    return torch.equal(nan, new.float().isnan()) and torch.equal(*bits)


def results(program: StageGraph) -> list[Node]:
    """The nodes that leave the graph, in order."""
    values = program.graph.output_node().args[0]
    assert isinstance(values, (tuple, list))
    return [node_of(value) for value in values]


def difference(old: torch.Tensor, new: torch.Tensor) -> str:
    """Say where two tensors differ first."""
    if old.dtype != new.dtype or old.shape != new.shape:
        return f"{old.dtype}{tuple(old.shape)} became {new.dtype}{tuple(new.shape)}"
    where = (old != new).nonzero()
    first = tuple(where[0].tolist()) if len(where) else ()
    return f"{len(where)} of {old.numel()} differ, first at {first}: {old[first]} {new[first]}"


def ops_of(program: StageGraph, namespace: str = "qfuse") -> list[str]:
    """The ops of one namespace that are in the graph."""
    return [
        node.target.overloadpacket.__name__
        for node in program.graph.nodes
        if getattr(node.target, "namespace", "") == namespace
    ]


def fired(program: StageGraph) -> list[str]:
    """The names of the rules that fired."""
    return [event.rule for event in program.log.of(Fired)]


def only_miss(program: NormalGraph) -> Missed:
    """The one refusal of a graph in which nothing fired."""
    assert fired(program) == []
    (miss,) = program.log.of(Missed)
    return miss


def hard_numbers(
    shape: Sequence[int],
    dtype: torch.dtype,
    scale: torch.Tensor | float = 0.0123,
    *,
    nan: bool = True,
) -> torch.Tensor:
    """Random numbers, half of them near ties of ``scale``, with zeros, infinities and the like."""
    noise = torch.randn(tuple(shape), dtype=torch.float64) * 40
    steps = noise.round() + 0.5
    step = scale.double() if isinstance(scale, torch.Tensor) else scale
    x = torch.where(torch.rand(tuple(shape)) < 0.5, steps, noise) * step
    flat = x.reshape(-1)
    special = (0.0, -0.0, float("inf"), -float("inf"), 3e38, 1e-40, *[float("nan")] * nan)
    for value in special[: flat.numel() // 8]:
        flat[int(torch.randint(flat.numel(), ()))] = value
    return x.to(dtype)


def codes(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Random quantized values over the whole type."""
    low, high = dtype_range(dtype)
    return torch.randint(low, high + 1, tuple(shape), dtype=torch.int64).to(dtype)


def scales(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random scales, none a power of two, over three orders of magnitude."""
    return (torch.rand(tuple(shape), dtype=torch.float64) * 0.09 + 1e-3).to(dtype)
