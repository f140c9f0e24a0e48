"""Prepare a lowered graph for a compiler: canonical names, state as inputs, writes last.

A lowered graph is functional, so a decode step would copy its whole cache twice: into the new
value, and back. Here every tensor that the source program mutates becomes an input, with a
``copy_`` at the end of the graph, which Inductor turns into an in-place write.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from qfuse.backends import _inductor_api
from qfuse.backends.aliases import replaced_node, root_of, viewed_node
from qfuse.backends.layout import Layout, dense_strides
from qfuse.ir.errors import BackendError
from qfuse.ir.graph.memory import address_of
from qfuse.ir.graph.stage_graph import MUTABLE_META, InputSpec, LoweredGraph, Mutation, place_of
from qfuse.ir.words import a_kind

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class InputSize:
    """A symbolic size: the axis that binds it, and its range.

    Attributes:
        position: Index of the input.
        axis: The axis of the input.
        low: The declared least value.
        high: The declared greatest value, ``None`` if unbounded.
    """

    position: int
    axis: int
    low: int
    high: int | None

    @property
    def name(self) -> str:
        """A name that is the same in every capture of the graph."""
        return f"x{self.position}_{self.axis}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlan:
    """How compiled code is called.

    Attributes:
        state: Buffers that the source program mutates, and constants that share memory with one;
            passed after the inputs, without a copy.
        layouts: The memory layout of each input.
        written: Positions among inputs and state that the code writes in place.
        late: ``(output, position)``: values that the caller of the code must write.
        returned: ``(output, position)``: outputs that are an input; the code returns a dummy.
        names: The user's name of each input and state.
        sizes: The symbolic sizes, by their symbol.
    """

    state: tuple[torch.Tensor, ...]
    layouts: tuple[Layout, ...]
    written: tuple[int, ...]
    late: tuple[tuple[int, int], ...]
    returned: tuple[tuple[int, int], ...]
    names: tuple[str, ...]
    sizes: dict[str, InputSize]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program(CallPlan):
    """A graph in the form for compilers, and how to run the compiled code.

    Attributes:
        module: Inputs ``x0, x1, ..``, then state ``s0, s1, ..``; constants ``c0, c1, ..`` as
            parameters; the output is the tuple of user outputs, then of the late values.
        constants: The distinct constants, by name.
        values: What the nodes compute: fake values of the lowered graph.
    """

    module: GraphModule
    constants: dict[str, torch.Tensor]
    values: dict[Node, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def examples(self) -> tuple[torch.Tensor, ...]:
        """Return fake inputs and state with the strides of the calls."""
        return tuple(n.meta["val"] for n in self.module.graph.find_nodes(op="placeholder"))


def prepare(lowered: LoweredGraph) -> Program:
    """Return the program of ``lowered``, which is not changed; tensors are shared.

    Raises:
        BackendError: The graph has an unsupported constant, such as a module or an opaque tensor.
    """
    return _Preparation(lowered).run()


class _Preparation:
    """State of one call of :func:`prepare`."""

    def __init__(self, lowered: LoweredGraph) -> None:
        self._lowered = lowered
        self._root = torch.nn.Module()
        self._graph = Graph()
        self._copies: dict[Node, Node] = {}
        self._mode = _inductor_api.new_trace_mode(shape_env_of(lowered.graph.nodes))
        self._layouts: list[Layout] = []
        self._inputs: list[Node] = []
        self._state: dict[str, torch.Tensor] = {}
        self._constants: dict[str, torch.Tensor] = {}
        self._names: dict[object, str] = {}
        self._sizes: dict[str, InputSize] = {}

    def run(self) -> Program:
        self._copy_inputs()
        self._copy_state()
        for node in self._lowered.graph.nodes:
            if node.op not in ("placeholder", "output") and node not in self._copies:
                self._copies[node] = self._copy(node)
        returned = self._returned()
        written, late = self._finish(dict(returned))
        module = GraphModule(self._root, self._graph)
        state = tuple(self._state.values())
        layouts = tuple(self._layouts)
        fed = [i.name for i in self._lowered.signature.inputs if i.placeholder is not None]
        names = (*fed, *self._state)
        values = {c: c.meta.get("val", n.meta.get("val")) for n, c in self._copies.items()}
        return Program(
            module=module,
            constants=self._constants,
            state=state,
            layouts=layouts,
            written=written,
            late=late,
            returned=returned,
            names=names,
            sizes=self._sizes,
            values=values,
        )

    def _copy_inputs(self) -> None:
        """Add the inputs, in the order of the signature."""
        sources = {str(n.target): n for n in self._lowered.graph.find_nodes(op="placeholder")}
        for spec in self._lowered.signature.inputs:
            if spec.placeholder is not None:
                node = sources.pop(spec.placeholder)
                like = node.meta["val"]
                self._note_sizes(spec, like)
                layout = Layout.of(like)
                strides = dense_strides(like.shape, layout.order)
                self._copies[node] = self._input(f"x{len(self._inputs)}", like, strides)
                self._layouts.append(layout)
        assert not sources, f"inputs that the signature does not know: {sorted(sources)}"

    def _note_sizes(self, spec: InputSpec, like: torch.Tensor) -> None:
        for axis, (name, size) in enumerate(zip(spec.shape, like.shape, strict=True)):
            if isinstance(name, str):
                bounds = self._lowered.signature.symbols[name]
                place = InputSize(len(self._inputs), axis, bounds.low, bounds.high)
                self._sizes.setdefault(str(size), place)

    def _copy_state(self) -> None:
        """Turn every buffer that the source program mutates into an input."""
        module = self._lowered.module
        reads = self._lowered.graph.find_nodes(op="get_attr")
        written = {m.buffer for m in self._lowered.signature.mutations if m.buffer is not None}
        written |= {str(n.target) for n in reads if n.meta.get(MUTABLE_META)}
        memory = {address_of(module.get_buffer(name)) for name in written}
        for node in reads:
            value = _attribute(module, str(node.target))
            # An alias of a mutated buffer is state, not a constant.
            if _is_plain(value) and address_of(value) in memory:
                written.add(str(node.target))
        made: dict[str, Node] = {}
        # Sorted, so that names and the cache key do not depend on the order of a set.
        for name in sorted(written):
            self._state[name] = buffer = module.get_buffer(name)
            made[name] = self._input(f"s{len(made)}", buffer, buffer.stride())
        self._copies |= {n: made[str(n.target)] for n in reads if str(n.target) in made}

    def _input(self, name: str, like: torch.Tensor, strides: Sequence[int]) -> Node:
        node = self._graph.placeholder(name)
        sizes = [_inductor_api.copied_size(size, self._mode) for size in like.shape]
        steps = [_inductor_api.copied_size(step, self._mode) for step in strides]
        with self._mode:
            node.meta["val"] = torch.empty_strided(
                sizes, steps, dtype=like.dtype, device=like.device
            )
        self._inputs.append(node)
        return node

    def _copy(self, node: Node) -> Node:
        if node.op == "get_attr":
            return self._graph.get_attr(self._constant(node))
        if node.op != "call_function":
            raise BackendError(f"{node.op} cannot be compiled", where=str(place_of(node)))
        copy = self._graph.node_copy(node, self._copies.__getitem__)
        # Fake values of other modes cannot be mixed with those of the inputs.
        copy.meta = {}
        return copy

    def _constant(self, node: Node) -> str:
        """Return the name of a constant in the program; aliases share one name."""
        value = _attribute(self._lowered.module, str(node.target))
        if isinstance(value, GraphModule):
            name = f"g{sum(1 for _ in self._root.children())}"
            self._root.add_module(name, value)
            return name
        if not _is_plain(value):
            raise BackendError(
                f"constant {node.target} is {_kind(value)}, which cannot be compiled",
                where=str(place_of(node)),
                fix="pass it as an ordinary tensor",
            )
        identity = _identity(value)
        if identity not in self._names:
            self._names[identity] = name = f"c{len(self._constants)}"
            self._constants[name] = value
            # Inductor clones the values of buffers, not those of parameters.
            self._root.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
        return self._names[identity]

    def _returned(self) -> tuple[tuple[int, int], ...]:
        """Return the outputs that are an input, whose value the caller already has."""
        outputs = self._lowered.signature.outputs
        # One node may be returned as the input itself and as a tensor of its own.
        needed = {spec.index for spec in outputs if spec.input_index is None}
        return tuple(
            {
                (spec.index, self._fed(spec.input_index))
                for spec in outputs
                if spec.index is not None
                and spec.input_index is not None
                and spec.index not in needed
            }
        )

    def _finish(
        self, returned: Mapping[int, int]
    ) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Add the writes and the output."""
        mutations = self._lowered.signature.mutations
        source = self._lowered.graph.output_node().args[0]
        assert isinstance(source, (tuple, list)), "the output of a lowered graph is a flat tuple"
        values = [self._copies[n] for n in source if isinstance(n, Node)]
        assert len(values) == len(source), "every output of a lowered graph is a node"
        targets = [self._position(m) for m in mutations]
        written = {self._inputs[p] for p in targets}
        outputs = [
            self._graph.call_function(aten.scalar_tensor.default, (0,))
            if i in returned
            else self._unaliased(value, written)
            for i, value in enumerate(values[len(mutations) :])
        ]
        late: list[tuple[int, int]] = []
        in_place: list[int] = []
        shared = self._shared_positions()
        for position, mutation in zip(targets, mutations, strict=True):
            target, value = self._inputs[position], values[mutation.output]
            # The program writes back what it has read.
            if value is target:
                continue
            # A write must not change the source of a later write. Inductor removes copies that
            # would ensure that (two swapped buffers came out equal), but keeps outputs separate.
            if position in shared or root_of(value, replaced_node) in written:
                late.append((len(outputs), position))
                outputs.append(self._unaliased(value, written))
            else:
                in_place.append(position)
                self._graph.call_function(aten.copy_.default, (target, value))
        self._graph.output(tuple(outputs))
        return tuple(in_place), tuple(late)

    def _position(self, mutation: Mutation) -> int:
        """Return the position of a mutation's target among inputs and state."""
        if mutation.input_index is not None:
            return self._fed(mutation.input_index)
        first = len(self._inputs) - len(self._state)
        return first + list(self._state).index(str(mutation.buffer))

    def _fed(self, leaf: int) -> int:
        """Return the position of a leaf of the signature among the inputs."""
        inputs = self._lowered.signature.inputs
        assert inputs[leaf].placeholder is not None, "a constant leaf is not in the graph"
        return sum(1 for spec in inputs[:leaf] if spec.placeholder is not None)

    def _unaliased(self, value: Node, written: set[Node]) -> Node:
        """Return a value that the writes at the end of the graph do not change."""
        if root_of(value, viewed_node) not in written:
            return value
        return self._graph.call_function(aten.clone.default, (value,))

    def _shared_positions(self) -> set[int]:
        """Return the positions of aliased state, which must not be written early."""
        first = len(self._inputs) - len(self._state)
        owners = [address_of(t) for t in self._state.values()]
        return {first + i for i, owner in enumerate(owners) if owners.count(owner) > 1}


def shape_env_of(nodes: Iterable[Node]) -> ShapeEnv | None:
    """Return the ``ShapeEnv`` of a graph, if it has symbolic sizes."""
    for node in nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            sizes: tuple[int | torch.SymInt, ...] = tuple(value.shape)
            for size in sizes:
                if isinstance(size, torch.SymInt):
                    env: ShapeEnv = size.node.shape_env
                    return env
    return None


def _is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Whether ``value`` is a tensor in ordinary memory."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _identity(value: torch.Tensor) -> object:
    """Return a key that is equal for tensors with the same memory and layout."""
    # All empty tensors have the null pointer.
    if value.numel() == 0:
        return object()
    return value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), value.device


def _attribute(module: torch.nn.Module, target: str) -> object:
    value: object = module
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {value.layout} tensor"
    return a_kind(value)
