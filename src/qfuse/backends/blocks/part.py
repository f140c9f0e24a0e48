"""Make a program of a part of another one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from qfuse.backends import _inductor_api
from qfuse.backends.layout import Layout, dense_strides
from qfuse.backends.prepare import InputSize, Program, shape_env_of

aten = torch.ops.aten


class CutError(Exception):
    """A program cannot be cut here; the message says why."""


def outside_values(
    program: Program, nodes: Sequence[Node], more: Iterable[Node] = ()
) -> list[Node]:
    """Return the values that ``nodes``, and ``more`` as results, take from elsewhere."""
    local = set(nodes)
    read = [n for node in nodes for n in node.all_input_nodes]
    found = dict.fromkeys(n for n in (*read, *more) if n not in local and n.op != "get_attr")
    return [n for n in found if not isinstance(program.values.get(n), (torch.SymInt, int))]


def symbol_sources(program: Program, nodes: Sequence[Node], inputs: Sequence[Node]) -> list[Node]:
    """Return inputs of the program to add so that every symbol of a part is a size of an input.

    Raises:
        CutError: A symbol is not a size of an input of the program.
    """
    needed: dict[str, None] = {}
    for node in (*inputs, *nodes, *(n for call in nodes for n in call.all_input_nodes)):
        needed |= dict.fromkeys(_symbols(program.values.get(node)))
    bound = {str(size) for node in inputs for size in program.values[node].shape}
    placeholders = list(program.module.graph.find_nodes(op="placeholder"))
    found: dict[Node, None] = {}
    for symbol in needed:
        if symbol in bound:
            continue
        if symbol not in program.sizes:
            raise CutError(f"the size {symbol} is not that of an axis of an input")
        found[placeholders[program.sizes[symbol].position]] = None
    return list(found)


def make_part(
    program: Program,
    nodes: Sequence[Node],
    inputs: Sequence[Node],
    constants: Sequence[str],
    outputs: Sequence[Node],
) -> Program:
    """Return a program of some calls of another one.

    Args:
        program: The whole program, which is not changed.
        nodes: The calls, in order.
        inputs: The values that the part gets: what its calls read, besides constants and sizes;
            constants of the whole among them become inputs.
        constants: The constants of the whole, in the order in which they are named in the part.
        outputs: What the part returns.

    Raises:
        CutError: A size of the part does not follow from the sizes of its inputs.
    """
    return _Part(program, inputs, constants).make(nodes, outputs)


class _Part:
    """State of one call of :func:`make_part`."""

    def __init__(self, program: Program, inputs: Sequence[Node], constants: Sequence[str]) -> None:
        self._program = program
        self._root = torch.nn.Module()
        self._graph = Graph()
        self._mode = _inductor_api.new_trace_mode(shape_env_of(program.module.graph.nodes))
        self._copies: dict[Node, Node] = {}
        self._sizes: dict[str, InputSize] = {}
        # The first axis of an input that has a size.
        self._axes: dict[str, tuple[Node, int]] = {}
        self._layouts: list[Layout] = []
        # Constants that are inputs here.
        self._lifted: dict[str, Node] = {}
        for position, node in enumerate(inputs):
            self._input(position, node)
        self._constants = {f"c{i}": program.constants[name] for i, name in enumerate(constants)}
        self._names = {name: f"c{i}" for i, name in enumerate(constants)}
        for name, value in self._constants.items():
            # Inductor clones the values of buffers, not those of parameters.
            self._root.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))

    def make(self, nodes: Sequence[Node], outputs: Sequence[Node]) -> Program:
        for node in nodes:
            self._copies[node] = self._copy(node)
        self._graph.output(tuple(self._of(node) for node in outputs))
        values = {copy: self._program.values.get(node) for node, copy in self._copies.items()}
        return Program(
            module=GraphModule(self._root, self._graph),
            constants=self._constants,
            state=(),
            layouts=tuple(self._layouts),
            written=(),
            late=(),
            returned=(),
            names=tuple(f"x{i}" for i in range(len(self._layouts))),
            sizes=self._sizes,
            values=values,
        )

    def _input(self, position: int, node: Node) -> None:
        like: torch.Tensor = value_of(self._program, node)
        layout = Layout.of(like)
        strides = dense_strides(like.shape, layout.order)
        made = self._graph.placeholder(f"x{position}")
        sizes = [_inductor_api.copied_size(size, self._mode) for size in like.shape]
        steps = [_inductor_api.copied_size(step, self._mode) for step in strides]
        with self._mode:
            made.meta["val"] = torch.empty_strided(
                sizes, steps, dtype=like.dtype, device=like.device
            )
        self._copies[node] = made
        if node.op == "get_attr":
            self._lifted[str(node.target)] = made
        self._layouts.append(layout)
        for axis, size in enumerate(like.shape):
            self._axes.setdefault(str(size), (made, axis))
            bounds = self._program.sizes.get(str(size))
            if bounds is not None:
                place = InputSize(position, axis, bounds.low, bounds.high)
                self._sizes.setdefault(str(size), place)

    def _copy(self, node: Node) -> Node:
        copy = self._graph.node_copy(node, self._of)
        copy.meta = {}
        return copy

    def _of(self, node: Node) -> Node:
        """Return the copy of a value, made now if it is a constant or a size."""
        if node in self._copies:
            return self._copies[node]
        if node.op == "get_attr":
            name = str(node.target)
            made = self._lifted.get(name) or self._graph.get_attr(self._attribute(name))
        else:
            made = self._size(node)
        self._copies[node] = made
        return made

    def _attribute(self, name: str) -> str:
        if name in self._names:
            return self._names[name]
        inner = getattr(self._program.module, name)
        assert isinstance(inner, GraphModule), f"{name} is a constant that the part was not given"
        if not hasattr(self._root, name):
            self._root.add_module(name, inner)
        return name

    def _size(self, node: Node) -> Node:
        value = self._program.values.get(node)
        if isinstance(value, torch.SymInt) and str(value) in self._axes:
            source, axis = self._axes[str(value)]
            return self._graph.call_function(aten.sym_size.int, (source, axis))
        read = node.all_input_nodes
        known = all(
            n in self._copies or isinstance(self._program.values.get(n), (torch.SymInt, int))
            for n in read
        )
        if node.op != "call_function" or not known:
            raise CutError(f"the size {node.name} does not follow from what the part reads")
        return self._copy(node)


def value_of(program: Program, node: Node) -> Any:
    """Return the value of a node; a constant is its own.

    Raises:
        CutError: It is not a tensor.
    """
    if node.op == "get_attr":
        return program.constants[str(node.target)]
    value = program.values.get(node)
    if not isinstance(value, torch.Tensor):
        raise CutError(f"{node.name} crosses a boundary and is not a tensor")
    return value


def _symbols(value: object) -> list[str]:
    """Return the names of the symbols in the sizes of a value."""
    if isinstance(value, torch.SymInt):
        return sorted(map(str, value.node.expr.free_symbols))
    if isinstance(value, torch.Tensor):
        return [name for size in (*value.shape, *value.stride()) for name in _symbols(size)]
    if isinstance(value, (tuple, list)):
        return [name for item in value for name in _symbols(item)]
    return []
