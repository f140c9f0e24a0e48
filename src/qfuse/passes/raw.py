"""Copy a caller's graph to rewrite it, and write the copy back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from qfuse.capture.provenance import annotate
from qfuse.ir.events import EventLog
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import (
    ASSUMED_META,
    MUTABLE_META,
    RULE_META,
    CapturedGraph,
    Signature,
)
from qfuse.ir.signature._tree_api import structure
from qfuse.passes._torch_api import empty_like, is_fake
from qfuse.passes.examples import Examples
from qfuse.passes.fakes import Fakes, fill, is_valueless, without_values
from qfuse.passes.in_place import functional_of
from qfuse.passes.refuse import attribute_of, is_aside
from qfuse.rewrite.rewriter import ORIGIN_META, origins

_COPY = torch.ops.aten.copy_.default
_CHECK = torch.ops.aten._assert_tensor_metadata.default  # noqa: SLF001 - an op of ATen
# New nodes inherit this metadata from the nodes that they replace.
_PROVENANCE = ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "custom")


@dataclass(slots=True)
class RawGraph:
    """A caller's module, and the plain functional copy of its graph.

    The copy has the caller's nodes under their names, except for writes: the written values are
    outputs of the copy, and the writes are appended at the end when the copy is written back.

    Attributes:
        module: The caller's module.
        program: The copy.
        fakes: The mode of the copy's fake values.
        nodes: The caller's nodes, by the names of their copies.
        targets: The caller's names of the copy's constants.
        writes: The caller's nodes that write, in order.
        aside: The caller's nodes that check inputs.
        checks: The caller's nodes that check the metadata of a value, by the node of that value.
            They are not copied, since they would keep the value alive; they are restored if the
            value remains.
    """

    module: GraphModule
    program: CapturedGraph
    fakes: Fakes
    nodes: dict[str, Node] = field(default_factory=dict)
    targets: dict[str, str] = field(default_factory=dict)
    writes: list[Node] = field(default_factory=list)
    aside: list[Node] = field(default_factory=list)
    checks: dict[Node, list[Node]] = field(default_factory=dict)

    def reapply_views(self, program: CapturedGraph) -> tuple[str, ...]:
        """Replace the graph of the caller's module by a rewritten copy, atomically.

        Returns:
            Names of the parameters and buffers that the graph no longer uses.
        """
        before = self.module.graph
        made: list[str] = []
        try:
            after = _Writer(self, program, made).graph()
            self.module.graph = after
            after.lint()
        # Also an interrupt must leave the module as it was.
        except BaseException:
            self.module.graph = before
            for name in made:
                delattr(self.module, name)
            raise
        return tuple(sorted(_reads(before) - _reads(after)))


def take(
    module: GraphModule, examples: Examples | None = None, *, assume: bool = False
) -> RawGraph:
    """Copy the graph of ``module``, which :func:`check_graph` must have accepted.

    Constants are shared with the module, not copied; those without values become plain meta
    tensors.

    Args:
        module: The caller's module.
        examples: Example inputs.
        assume: Whether integers without values are assumed to be zero points in the usual range.

    Raises:
        GraphError: A value is missing, and there is no example input to compute it from.
    """
    return _Reader(module, assume=assume).read(examples)


def _reads(graph: Graph) -> set[str]:
    return {str(node.target) for node in graph.find_nodes(op="get_attr")}


class _Reader:
    """Copies a graph."""

    def __init__(self, module: GraphModule, *, assume: bool) -> None:
        self._module = module
        self._assume = assume
        self._root = torch.nn.Module()
        self._graph = Graph()
        self._copies: dict[Node, Node] = {}
        self._held: dict[int, str] = {}
        self._written: set[int] = set()
        fakes = Fakes.of(module.graph)
        program = CapturedGraph(module, _signature(), EventLog())
        self._raw = RawGraph(module, program, fakes)

    def read(self, examples: Examples | None) -> RawGraph:
        # All writes first: a constant that is written anywhere is none, also where it is read
        # before.
        for node in self._module.graph.nodes:
            if node.target is _COPY and isinstance(node.args[0], Node):
                self._raw.writes.append(node)
                if node.args[0].op == "get_attr":
                    self._written.add(_memory(attribute_of(self._module, node.args[0])))
        for node in self._module.graph.nodes:
            self._copy(node)
        copy = GraphModule(self._root, self._graph)
        fill(copy, self._raw.fakes, examples)
        self._raw.program = CapturedGraph(copy, _signature(), EventLog())
        annotate(copy)
        for node in copy.graph.find_nodes(op="get_attr"):
            constant = attribute_of(self._module, self._raw.nodes[node.name])
            # By memory, since a view of a written buffer changes with it.
            if _memory(constant) in self._written:
                node.meta[MUTABLE_META] = True
            elif self._assume and is_valueless(constant) and not constant.is_floating_point():
                node.meta[ASSUMED_META] = True
        return self._raw

    def _copy(self, node: Node) -> None:
        if node in self._raw.writes:
            # ``copy_`` returns its target.
            self._copies[node] = self._copies[node.args[0]]  # type: ignore[index]
        elif is_aside(self._module, node):
            self._raw.aside.append(node)
        elif is_call(node, _CHECK) and len(node.all_input_nodes) == 1:
            self._raw.checks.setdefault(node.all_input_nodes[0], []).append(node)
        elif node.op == "output":
            written = tuple(self._copies[write.args[1]] for write in self._raw.writes)  # type: ignore[index]
            self._graph.output((map_arg(node.args[0], self._copies.__getitem__), written))
        else:
            self._copies[node] = self._node(node)

    def _node(self, node: Node) -> Node:
        target = self._constant(node) if node.op == "get_attr" else _functional(node)
        args, kwargs = map_arg((node.args, node.kwargs), self._copies.__getitem__)
        new = self._graph.create_node(node.op, target, args, kwargs, node.name, node.type)
        self._raw.nodes[new.name] = node
        new.meta = dict(node.meta)
        if node.op == "get_attr":
            constant = attribute_of(self._module, node)
            new.meta["val"] = self._raw.fakes.constant(constant)
        elif "val" in node.meta:
            new.meta["val"] = self._raw.fakes.value(node.meta["val"])
        return new

    def _constant(self, node: Node) -> str:
        """Register the constant of a node once, and return its name in the copy."""
        value = attribute_of(self._module, node)
        name = self._held.get(id(value))
        if name is None:
            name = str(node.target).replace(".", "_")
            while hasattr(self._root, name):
                name += "_"
            plain = without_values(value) if is_valueless(value) else value.detach()
            self._root.register_buffer(name, plain)
            self._held[id(value)] = name
            self._raw.targets[name] = str(node.target)
        return name


class _Writer:
    """Writes a rewritten copy as a graph of the caller's module.

    Args:
        raw: The source of the copy.
        program: The rewritten copy.
        made: Collects the names of buffers that are added to the caller's module.
    """

    def __init__(self, raw: RawGraph, program: CapturedGraph, made: list[str]) -> None:
        self._raw = raw
        self._program = program
        self._made = made
        self._graph = empty_like(raw.module.graph)
        self._copies: dict[Node, Node] = {}
        self._roots: dict[str, Node] = {}
        self._names: dict[str, str] = dict(raw.targets)
        self._kind = _Kind.of(raw)

    def graph(self) -> Graph:
        nodes = list(self._program.graph.nodes)
        waiting = sum(node.op == "placeholder" for node in nodes)
        # The checks read the inputs, so they follow the last placeholder.
        if not waiting:
            self._check_inputs()
        for node in nodes:
            if node.op == "output":
                self._finish(node)
                break
            self._copies[node] = self._node(node)
            if node.op in {"placeholder", "get_attr"}:
                self._roots[str(self._copies[node].target)] = self._copies[node]
            if node.op == "placeholder":
                waiting -= 1
                if not waiting:
                    self._check_inputs()
        return self._graph

    def _check_inputs(self) -> None:
        for node in self._raw.aside:
            args, kwargs = map_arg((node.args, node.kwargs), self._caller)
            new = self._graph.create_node(node.op, node.target, args, kwargs, node.name)
            new.meta = dict(node.meta)

    def _caller(self, node: Node) -> Node:
        """Return the new node for one of the caller's inputs or constants."""
        if str(node.target) not in self._roots:
            new = self._graph.create_node(node.op, node.target, name=node.name)
            new.meta = dict(node.meta)
            self._roots[str(node.target)] = new
        return self._roots[str(node.target)]

    def _node(self, node: Node) -> Node:
        own = None if RULE_META in node.meta else self._raw.nodes.get(node.name)
        target: Any = node.target if own is None else _functional(own)
        if own is None and node.op == "get_attr":
            target = self._name(str(target))
        args, kwargs = map_arg((node.args, node.kwargs), self._copies.__getitem__)
        new = self._graph.create_node(node.op, target, args, kwargs, node.name)
        if own is not None:
            new.type = own.type
            new.meta = dict(own.meta)
            new.meta.setdefault("val", self._raw.fakes.outside(node.meta["val"]))
            self._check(own, new)
            return new
        source = next((self._raw.nodes[n] for n in origins(node) if n in self._raw.nodes), None)
        if source is not None:
            new.meta = {k: source.meta[k] for k in _PROVENANCE if k in source.meta}
        for key in (RULE_META, ORIGIN_META):
            if key in node.meta:
                new.meta[key] = node.meta[key]
        new.meta["val"] = self._raw.fakes.outside(node.meta["val"])
        return new

    def _check(self, own: Node, new: Node) -> None:
        """Restore the checks of one of the caller's values."""
        for check in self._raw.checks.get(own, ()):
            args, kwargs = map_arg((check.args, check.kwargs), lambda _: new)
            made = self._graph.create_node(check.op, check.target, args, kwargs, check.name)
            made.meta = dict(check.meta)

    def _name(self, name: str) -> str:
        """Return the caller's name of a constant; new ones are added to the caller's module."""
        if name not in self._names:
            new, count = name, 0
            while hasattr(self._raw.module, new):
                count += 1
                new = f"{name}_{count}"
            constant = self._program.module.get_buffer(name)
            self._raw.module.register_buffer(new, self._kind.make(constant))
            self._made.append(new)
            self._names[name] = new
        return self._names[name]

    def _finish(self, node: Node) -> None:
        output: Any = node.args[0]
        returned, written = output
        for write, value in zip(self._raw.writes, written, strict=True):
            into, *rest = write.args
            assert isinstance(into, Node), "it was found to write to a node"
            args = (self._caller(into), self._copies[value], *rest[1:])
            new = self._graph.create_node(write.op, write.target, args, write.kwargs, write.name)
            new.meta = dict(write.meta)
        out = self._graph.output(map_arg(returned, self._copies.__getitem__))
        out.meta = dict(self._raw.module.graph.output_node().meta)


@dataclass(frozen=True, slots=True)
class _Kind:
    """The kind of the caller's constants, which new constants follow.

    Attributes:
        make: Converts a constant of the copy to that kind.
    """

    make: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def of(cls, raw: RawGraph) -> _Kind:
        nodes = raw.module.graph.find_nodes(op="get_attr")
        constants = [attribute_of(raw.module, node) for node in nodes]
        missing = [c for c in constants if is_valueless(c)]
        if not missing:
            return cls(lambda tensor: tensor)
        all_missing = len(missing) == len(constants)
        like = missing[0]

        def make(tensor: torch.Tensor) -> torch.Tensor:
            # Beside constants with values a new one keeps its own; if none has values, it gets none
            # either.
            if not tensor.is_meta and not all_missing:
                return tensor
            if is_fake(like):
                return Fakes(like.fake_mode, on_meta=False).empty(tensor, like.device)
            return without_values(tensor)

        return cls(make)


def _functional(node: Node) -> Any:
    """Return the target of a node; for in-place ops on a fresh value, the functional op."""
    return functional_of(node) or node.target


def _memory(tensor: torch.Tensor) -> int:
    """Return a key that identifies the memory of a constant."""
    # Without memory, or packed by a library, a tensor has no address; objects tell such apart.
    if is_valueless(tensor) or tensor.layout is not torch.strided:
        return id(tensor)
    if tensor.untyped_storage().nbytes() == 0:
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


def _signature() -> Signature:
    """Return a minimal signature; the copy is never called."""
    return Signature(structure(()), (), structure(()), ())
