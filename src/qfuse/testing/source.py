"""Source graphs for tests of dialects: built by hand, run before and after, compared by bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Interpreter, Node

from qfuse.ir.events import Fired, Missed
from qfuse.ir.graph.stage_graph import CapturedGraph, NormalGraph, StageGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops.views import node_of
from qfuse.ir.quant.spec import dtype_range
from qfuse.normalize import normalize
from qfuse.normalize.builtin import BUILTIN
from qfuse.normalize.importers.dialect import Dialect
from qfuse.rewrite.context import RewriteContext
from qfuse.testing.build import GraphBuilder

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Source:
    """A source graph under construction, with the values of its inputs.

    Attributes:
        b: The builder: ``source.b.call(op, x)`` adds a call, ``source.b.const(name, value)`` a
            constant.
        inputs: The value of each input.
    """

    b: GraphBuilder = field(default_factory=GraphBuilder)
    inputs: list[torch.Tensor] = field(default_factory=list)

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


def assert_same_bits(
    source: Source,
    *outs: Node,
    dialects: Sequence[Dialect] = BUILTIN,
    context: RewriteContext | None = None,
) -> NormalGraph:
    """Normalize, and assert that every output has the bits, dtype and strides that it had.

    A NaN equals any other NaN.

    Args:
        source: The graph.
        *outs: Its outputs.
        dialects: The dialects to normalize with.
        context: The context of the run.

    Returns:
        The normalized graph.
    """
    program = source.done(*outs)
    before = _run(program, source.inputs)
    text = to_text(program.graph)
    normal = normalize(program, context, dialects)
    after = _run(normal, source.inputs)
    for old, new, node in zip(before, after, results(normal), strict=True):
        shown = f"{text}\n-->\n{to_text(normal.graph)}"
        same = old.dtype == new.dtype and old.shape == new.shape and equal_but_for_nan(old, new)
        assert same, f"{_REPAIR}: {describe_difference(old, new)}\n{shown}"
        fake = node.meta["val"]
        assert fake.dtype == new.dtype, (
            f"%{node.name} is {new.dtype}, and its fake kernel says {fake.dtype}\n{shown}"
        )
        steps = promised_strides(normal, source.inputs, fake, new), strides(new)
        assert steps[0] == steps[1], (
            f"%{node.name} has the strides {steps[1]}, and its fake kernel says {steps[0]}\n{shown}"
        )
    return normal


_REPAIR = "normalizing changed bits; refuse what the rule cannot express exactly"


def _run(program: StageGraph, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    program.module.recompile()
    with torch.no_grad():
        return list(Interpreter(program.module).run(*inputs))


def strides(x: torch.Tensor) -> list[int]:
    """Return the strides that matter: those of axes along which there is a step to take."""
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if x.numel() and size > 1]


def promised_strides(
    program: StageGraph, inputs: Sequence[torch.Tensor], fake: torch.Tensor, real: torch.Tensor
) -> list[int]:
    """Return the strides that matter of a fake tensor for these inputs.

    Args:
        program: The graph, whose inputs may have symbolic sizes.
        inputs: The values of its inputs, whose sizes are numbers.
        fake: A fake tensor of the graph.
        real: Its value.
    """
    numbers: dict[Any, int] = {}
    for node, value in zip(program.graph.find_nodes(op="placeholder"), inputs, strict=True):
        sizes: tuple[Any, ...] = node.meta["val"].shape
        for size, number in zip(sizes, value.shape, strict=True):
            if isinstance(size, torch.SymInt):
                numbers[size.node.expr] = number
    if not real.numel():
        return []
    steps: tuple[Any, ...] = fake.stride()
    known = [s.node.expr.subs(numbers) if isinstance(s, torch.SymInt) else s for s in steps]
    return [int(step) for step, size in zip(known, real.shape, strict=True) if size > 1]


def equal_but_for_nan(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether two tensors have the same bits; torch does not define which NaN a result is."""
    if not old.dtype.is_floating_point:
        return torch.equal(old, new)
    kind = _BITS[old.element_size()]
    nan = old.float().isnan()
    bits = [t.contiguous().view(kind).masked_fill(nan, 0) for t in (old, new)]
    return torch.equal(nan, new.float().isnan()) and torch.equal(*bits)


def results(program: StageGraph) -> list[Node]:
    """Return the nodes that leave the graph, in order."""
    values = program.graph.output_node().args[0]
    assert isinstance(values, (tuple, list)), "the output of a graph is one flat tuple"
    return [node_of(value) for value in values]


def describe_difference(old: torch.Tensor, new: torch.Tensor) -> str:
    """Say where two tensors differ first."""
    if old.dtype != new.dtype or old.shape != new.shape:
        return f"{old.dtype}{tuple(old.shape)} became {new.dtype}{tuple(new.shape)}"
    where = (old != new).nonzero()
    if not len(where):
        return "the sign of a zero, or which elements are NaN"
    first = tuple(where[0].tolist())
    return f"{len(where)} of {old.numel()} differ, first at {first}: {old[first]} {new[first]}"


def ops_of(program: StageGraph, namespace: str = "qfuse") -> list[str]:
    """Return the ops of one namespace that are in the graph, in order."""
    return [
        node.target.overloadpacket.__name__
        for node in program.graph.nodes
        if getattr(node.target, "namespace", "") == namespace
    ]


def fired(program: StageGraph) -> list[str]:
    """Return the names of the rules that fired, in order."""
    return [event.rule for event in program.log.of(Fired)]


def only_miss(program: StageGraph) -> Missed:
    """Return the one refusal of a graph in which nothing fired."""
    assert fired(program) == [], f"these rules fired: {', '.join(fired(program))}"
    misses = program.log.of(Missed)
    text = "; ".join(f"{miss.rule} at {miss.at}: {miss.reason}" for miss in misses)
    assert len(misses) == 1, f"there are {len(misses)} refusals, not one: {text or 'none'}"
    return misses[0]


def hard_numbers(
    shape: Sequence[int],
    dtype: torch.dtype,
    scale: torch.Tensor | float = 0.0123,
    *,
    nan: bool = True,
) -> torch.Tensor:
    """Return random numbers, half of them near ties of ``scale``, with zeros and infinities."""
    noise = torch.randn(tuple(shape), dtype=torch.float64) * 40
    steps = noise.round() + 0.5
    step = scale.double() if isinstance(scale, torch.Tensor) else scale
    x = torch.where(torch.rand(tuple(shape)) < 0.5, steps, noise) * step  # noqa: PLR2004
    flat = x.reshape(-1)
    special = (0.0, -0.0, float("inf"), -float("inf"), 3e38, 1e-40, *[float("nan")] * nan)
    for value in special[: flat.numel() // 8]:
        flat[int(torch.randint(flat.numel(), ()))] = value
    return x.to(dtype)


def codes(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return random quantized values over the whole type."""
    low, high = dtype_range(dtype)
    return torch.randint(low, high + 1, tuple(shape), dtype=torch.int64).to(dtype)


def scales(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random scales, none a power of two, over three orders of magnitude."""
    return (torch.rand(tuple(shape), dtype=torch.float64) * 0.09 + 1e-3).to(dtype)
