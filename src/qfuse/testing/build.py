"""Build small graphs by hand, with fake values and real constants."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeVar, overload

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    StatelessSymbolicContext,
    is_concrete_int,
)
from torch.fx.node import Argument, map_arg

from qfuse.ir.events import EventLog
from qfuse.ir.graph.stage_graph import (
    InputSpec,
    NormalGraph,
    OutputSpec,
    Signature,
    StageGraph,
    SymbolRange,
)
from qfuse.ir.signature._tree_api import structure
from qfuse.ir.sizes import Size, inverse, same_size
from qfuse.testing._fake_api import declare_range, fake_constant, new_fake_mode

G = TypeVar("G", bound=StageGraph)


class FixedSizeError(ValueError):
    """A symbolic size of a graph is a number, as torch.export would refuse it."""


class GraphBuilder:
    """Adds inputs, constants and calls; every node gets a fake ``meta["val"]``.

    >>> b = GraphBuilder()
    >>> x = b.arg("x", torch.float32, 4, 8)
    >>> w = b.const("w", torch.ones(2, 8))
    >>> program = b.done(b.call(torch.ops.aten.linear.default, x, w))
    >>> program.stage
    'normal'
    """

    def __init__(self) -> None:
        self.module = GraphModule(torch.nn.Module(), Graph())
        self.graph = self.module.graph
        self._mode = new_fake_mode()
        self._inputs: list[InputSpec] = []
        self._symbols: dict[str, SymbolRange] = {}

    def arg(
        self, name: str, dtype: torch.dtype, *shape: int | str, order: Sequence[int] | None = None
    ) -> Node:
        """Add a graph input.

        Args:
            name: Its name.
            dtype: Its dtype.
            *shape: Its sizes. A string is symbolic; equal names are equal sizes.
            order: Its axes from the largest stride to the smallest; contiguous by default.
        """
        sizes = [self._hint(s) for s in shape]
        axes = tuple(range(len(sizes)) if order is None else order)
        stored = torch.empty([sizes[axis] for axis in axes], dtype=dtype)
        real = stored.permute(inverse(axes))
        node = self.graph.placeholder(name)
        node.meta["val"] = self._fake_input(real, shape)
        for size, given in zip(node.meta["val"].shape, shape, strict=True):
            if isinstance(given, str):
                # As after capture: tracing assumes two or more; the signature has the range.
                declare_range(size, 2, 4096)
        layout = None if order is None else axes
        cpu = torch.device("cpu")
        self._inputs.append(InputSpec(name, name, dtype, tuple(shape), cpu, order=layout))
        return node

    def const(self, name: str, value: torch.Tensor) -> Node:
        """Add a constant."""
        # One constant may be loaded several times, as by separate calls of a source.
        if not hasattr(self.module, name):
            self.module.register_buffer(name, value)
        node = self.graph.get_attr(name)
        node.meta["val"] = fake_constant(self._mode, value)
        return node

    def call(self, op: OpOverload, *args: Argument, **kwargs: Argument) -> Node:
        """Add a call of ``op``."""
        node = self.graph.call_function(op, args, kwargs)

        def value(arg: Argument) -> Any:
            return map_arg(arg, lambda n: n.meta["val"])

        node.meta["val"] = self._mode.call(op, value(args), value(kwargs))
        return node

    def item(self, node: Node, index: int) -> Node:
        """Add ``node[index]``."""
        new = self.graph.call_function(operator.getitem, (node, index))
        new.meta["val"] = node.meta["val"][index]
        return new

    @overload
    def done(self, *outs: Node) -> NormalGraph: ...

    @overload
    def done(self, *outs: Node, stage: type[G]) -> G: ...

    def done(self, *outs: Node, stage: type[StageGraph] = NormalGraph) -> StageGraph:
        """Finish the graph.

        Raises:
            ValueError: A call read a symbolic size as a number, which fixes it.
        """
        self._check_symbols()
        self.graph.output(outs)
        self.module.recompile()
        leaves = tuple(range(len(self._inputs)))
        signature = Signature(
            structure((leaves, {})),
            tuple(self._inputs),
            structure(tuple(range(len(outs)))),
            tuple(OutputSpec(i) for i in range(len(outs))),
            symbols=dict(self._symbols),
            parameters=tuple(i.name for i in self._inputs),
        )
        return stage(self.module, signature, EventLog())

    def _check_symbols(self) -> None:
        """Raise if a symbolic size is a number by now."""
        nodes = {node.target: node for node in self.graph.find_nodes(op="placeholder")}
        for spec in self._inputs:
            if (node := nodes.get(spec.name)) is None:
                continue  # erased
            for size, given in zip(node.meta["val"].shape, spec.shape, strict=True):
                if isinstance(given, str) and is_concrete_int(size):
                    raise FixedSizeError(
                        f"a call read the symbolic size {given!r} as a number: it is {int(size)} "
                        "in the types of the graph, whatever the inputs are"
                    )
        # A symbol stays one where a guard fixes what was derived from it, as at a hint of one.
        sizes = {str(size): size for node in self.graph.nodes for size in _symbolic_sizes(node)}
        for text, size in sizes.items():
            if same_size(size, 1):
                raise FixedSizeError(f"a call read the symbolic size {text} as a number: it is 1")

    def _fake_input(self, real: torch.Tensor, shape: Sequence[int | str]) -> torch.Tensor:
        """Return a fake tensor in the layout of ``real``, with symbols for named sizes."""
        if all(isinstance(size, int) for size in shape):
            whole = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)
            return fake_constant(self._mode, whole)
        dynamic = [DimDynamic.STATIC if isinstance(s, int) else DimDynamic.DUCK for s in shape]
        context: Any = StatelessSymbolicContext(dynamic_sizes=dynamic)
        fake: torch.Tensor = self._mode.from_tensor(real, symbolic_context=context)
        return fake

    def _hint(self, size: int | str) -> int:
        if isinstance(size, int):
            return size
        if size not in self._symbols:
            # Distinct hints, so that sizes that are equal by coincidence are not unified.
            self._symbols[size] = SymbolRange(1, 5 + 2 * len(self._symbols), 4096)
        return self._symbols[size].hint


def _symbolic_sizes(node: Node) -> list[Size]:
    value = node.meta.get("val")
    parts = value if isinstance(value, (list, tuple)) else [value]
    shapes: list[Sequence[Size]] = [p.shape for p in parts if isinstance(p, torch.Tensor)]
    return [size for shape in shapes for size in shape if isinstance(size, torch.SymInt)]
