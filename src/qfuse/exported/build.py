"""Build an exported program of a lowered graph, with the signature of its source."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymIntArgument,
    TensorArgument,
)
from torch.fx import Graph, Node

from qfuse.ir.errors import BackendError
from qfuse.ir.graph import stage_graph
from qfuse.ir.graph.stage_graph import LoweredGraph
from qfuse.ir.sizes import axis_order, inverse

aten = torch.ops.aten
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_META = ("val", "stack_trace", "nn_module_stack", "source_fn_stack")


def build_program(lowered: LoweredGraph, source: ExportedProgram) -> ExportedProgram:
    """Return ``lowered`` as a program with the signature of ``source``.

    Raises:
        BackendError: A constant is not a plain tensor.
    """
    return _Builder(lowered, source).build()


class _Builder:
    """State of one call of :func:`build_program`."""

    def __init__(self, lowered: LoweredGraph, source: ExportedProgram) -> None:
        self._lowered = lowered
        self._source = source
        self._graph = Graph()
        self._copies: dict[Node, Node] = {}
        self._inputs: list[InputSpec] = []
        self._outputs: list[OutputSpec] = []
        self._returned: list[Any] = []
        self._leaves: list[Node] = []
        self._names: dict[str, str] = {}
        self._values: dict[str, torch.Tensor] = {}

    def build(self) -> ExportedProgram:
        """Return the program."""
        self._add_constants()
        self._add_inputs()
        for node in self._lowered.graph.nodes:
            if node.op not in {"placeholder", "get_attr", "output"}:
                self._copies[node] = self._graph.node_copy(node, self._copies.__getitem__)
                self._copies[node].meta = {k: node.meta[k] for k in _META if k in node.meta}
        self._add_outputs()
        kept = set(self._source.graph_signature.non_persistent_buffers)
        own = {self._names[name]: value for name, value in self._values.items()}
        entry = self._source.module_call_graph[0].signature
        assert entry is not None, "the first entry of a call graph is the program itself"
        users = [s.arg for s in self._inputs if s.kind is InputKind.USER_INPUT]
        results = [s.arg for s in self._outputs if s.kind is OutputKind.USER_OUTPUT]
        signature = ModuleCallSignature(
            users, results, entry.in_spec, entry.out_spec, entry.forward_arg_names
        )
        return ExportedProgram(
            torch.nn.Module(),
            self._graph,
            ExportGraphSignature(self._inputs, self._outputs),
            {name: value for name, value in own.items() if name not in kept},
            dict(self._source.range_constraints),
            [ModuleCallEntry("", signature)],
            self._source.example_inputs,
            {name: value for name, value in own.items() if name in kept},
            verifiers=self._source.verifiers,
        )

    def _add_constants(self) -> None:
        """Make every constant a buffer, which is an input of the graph."""
        written = self._written_buffers()
        read = self._lowered.graph.find_nodes(op="get_attr")
        nodes: dict[str, Node] = {}
        # The written ones keep their names, which are part of the signature. Some are never read.
        for name in sorted(written.keys() - {str(node.target) for node in read}):
            self._add_buffer(name, written[name].meta["val"], written=True)
        for node in sorted(read, key=lambda n: n.target not in written):
            name = str(node.target)
            if name not in nodes:
                nodes[name] = self._add_buffer(name, node.meta["val"], written=name in written)
            self._copies[node] = nodes[name]

    def _add_buffer(self, name: str, meta: torch.Tensor, *, written: bool) -> Node:
        value = self._lowered.module.get_buffer(name)
        if value.layout is not torch.strided:
            raise BackendError(f"constant {name} is a {value.layout} tensor")
        self._names[name] = free = _free_name(name, self._names.values())
        self._values[name] = value.clone() if written else value
        node = self._graph.placeholder(f"b_{free.replace('.', '_')}")
        node.meta["val"] = meta
        persistent = free not in self._source.graph_signature.non_persistent_buffers
        spec = InputSpec(InputKind.BUFFER, TensorArgument(node.name), free, persistent)
        self._inputs.append(spec)
        return node

    def _add_inputs(self) -> None:
        found = {str(n.target): n for n in self._lowered.graph.find_nodes(op="placeholder")}
        for spec in self._lowered.signature.inputs:
            if spec.placeholder is None:
                node = self._placeholder(_identifier(spec.name))
                node.meta["val"] = spec.constant
                constant = ConstantArgument(node.name, spec.constant)
                self._inputs.append(InputSpec(InputKind.USER_INPUT, constant, None))
            else:
                old = found[spec.placeholder]
                node = self._placeholder(spec.placeholder)
                node.meta["val"] = old.meta["val"]
                self._copies[old] = node
                argument = TensorArgument(node.name)
                self._inputs.append(InputSpec(InputKind.USER_INPUT, argument, None))
            self._leaves.append(node)

    def _placeholder(self, name: str) -> Node:
        """Add an input of this name, as torch.export names it: also that of a builtin of Python.

        FX would rename ``input``, and torch replays decompositions by the names of inputs.
        """
        taken = {node.name for node in self._graph.nodes}
        node = self._graph.placeholder(name)
        if name not in taken:
            node.name = name
        return node

    def _written_buffers(self) -> dict[str, Node]:
        """Return what is written into each buffer."""
        given, mutations = self._given(), self._lowered.signature.mutations
        return {m.buffer: given[m.output] for m in mutations if m.buffer is not None}

    def _given(self) -> list[Node]:
        """Return what the lowered graph returns: written values, and results that are tensors."""
        given = self._lowered.graph.output_node().args[0]
        assert isinstance(given, (tuple, list)), "the output of a lowered graph is a flat tuple"
        return [node for node in given if isinstance(node, Node)]

    def _add_outputs(self) -> None:
        signature = self._lowered.signature
        values = [self._copies[node] for node in self._given()]
        fresh: dict[int, Node] = {}
        for mutation in signature.mutations:
            value = values[mutation.output]
            if mutation.buffer is not None:
                target = self._names[mutation.buffer]
                self._return(OutputKind.BUFFER_MUTATION, value, target)
            else:
                assert mutation.input_index is not None, "a mutation has a target"
                fresh[mutation.input_index] = value
                target = self._leaves[mutation.input_index].name
                self._return(OutputKind.USER_INPUT_MUTATION, value, target)
        results = values[len(signature.mutations) :]
        for spec in signature.outputs:
            if spec.input_index is not None:
                # The value after the write, if the program writes this input.
                leaf = spec.input_index
                self._return(OutputKind.USER_OUTPUT, fresh.get(leaf, self._leaves[leaf]), None)
            elif spec.index is not None:
                node = self._laid_out(results[spec.index], spec)
                self._return(OutputKind.USER_OUTPUT, node, None)
            elif spec.size is not None:
                node = self._size(ast.parse(spec.size, mode="eval").body)
                argument = SymIntArgument(node.name)
                self._outputs.append(OutputSpec(OutputKind.USER_OUTPUT, argument, None))
                self._returned.append(node)
            else:
                constant = ConstantArgument("", spec.constant)
                self._outputs.append(OutputSpec(OutputKind.USER_OUTPUT, constant, None))
                self._returned.append(spec.constant)
        self._graph.output(tuple(self._returned))

    def _return(self, kind: OutputKind, node: Node, target: str | None) -> None:
        self._outputs.append(OutputSpec(kind, TensorArgument(node.name), target))
        self._returned.append(node)

    def _laid_out(self, node: Node, spec: stage_graph.OutputSpec) -> Node:
        """Return a value with the order of axes that the source gives it."""
        shape, have = _hints(node.meta["val"].shape), _hints(node.meta["val"].stride())
        order = spec.order
        if spec.strides is not None:
            order = axis_order(shape, spec.strides)
        if order is None or axis_order(shape, have) == order:
            return node
        turned = self._call(aten.permute.default, node, list(order))
        dense = self._call(aten.clone.default, turned, memory_format=torch.contiguous_format)
        return self._call(aten.permute.default, dense, list(inverse(order)))

    def _size(self, tree: ast.expr) -> Node:
        """Return the node of an expression over the sizes of inputs."""
        match tree:
            case ast.Name(id=symbol):
                for leaf, spec in zip(self._leaves, self._lowered.signature.inputs, strict=True):
                    if symbol in spec.shape:
                        return self._call(aten.sym_size.int, leaf, spec.shape.index(symbol))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return self._call(_OPERATORS[type(op)], self._operand(left), self._operand(right))
        raise BackendError(f"the program returns the size {ast.unparse(tree)}")

    def _operand(self, tree: ast.expr) -> Any:
        return tree.value if isinstance(tree, ast.Constant) else self._size(tree)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self._graph.call_function(target, args, kwargs)
        values = [a.meta["val"] if isinstance(a, Node) else a for a in args]
        node.meta["val"] = target(*values, **kwargs)
        return node


def _hints(sizes: Sequence[int | torch.SymInt]) -> list[int]:
    return [size if isinstance(size, int) else size.node.hint or 2 for size in sizes]


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def _free_name(name: str, taken: Iterable[str]) -> str:
    """Return a name of a buffer: none may be the path to another one."""
    clash = any(
        name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.")
        for other in taken
    )
    return name.replace(".", "_") + "_" if clash else name
