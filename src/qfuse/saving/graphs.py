"""Lowered graphs as JSON: they run the calls for which compiled code is wrong."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from qfuse.ir.errors import ModelFileError
from qfuse.ir.graph.buffers import set_buffer, with_graph
from qfuse.ir.graph.stage_graph import place_of
from qfuse.saving.codec import UnknownValueError, from_data, to_data
from qfuse.saving.tensors import TensorReader, TensorWriter

# Functions on sizes, and `getitem`.
_FUNCTIONS: Mapping[str, Any] = {
    **{f"operator.{name}": getattr(operator, name) for name in (
        "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs", "getitem",
        "eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "not_",
    )},
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc", "sqrt")},
    **{f"torch.{name}": getattr(torch, name) for name in (
        "sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not", "sym_sqrt", "sym_sum",
    )},
}  # fmt: skip
_NAMES = {function: name for name, function in _FUNCTIONS.items()}


@dataclass(frozen=True, slots=True)
class _NodeRef:
    """The result of an earlier node, by its position."""

    position: int


def graph_to_data(
    module: GraphModule, tensors: TensorWriter, state: Collection[str] = ()
) -> dict[str, Any]:
    """Return a graph as what JSON can hold; its tensors are added to ``tensors``.

    Args:
        module: The graph.
        tensors: Collects its constants.
        state: Names of buffers that the program writes, whether the graph reads them or not.

    Raises:
        ModelFileError: A node calls a function or has an argument that cannot be saved.
    """
    positions: dict[Node, int] = {}
    nodes: list[list[Any]] = []
    for node in module.graph.nodes:
        positions[node] = len(nodes)
        nodes.append(_node_to_data(node, positions))
    names = dict.fromkeys(str(n.target) for n in module.graph.find_nodes(op="get_attr"))
    written = dict.fromkeys(state)
    used = {
        name: tensors.add(name, _attribute(module, name), mutable=name in written)
        for name in dict.fromkeys([*names, *written])
    }
    return {"nodes": nodes, "tensors": used}


def graph_from_data(data: Mapping[str, Any], tensors: TensorReader) -> GraphModule:
    """Return the graph of :func:`graph_to_data`.

    Raises:
        ModelFileError: An op is not known in this process.
    """
    root, graph = torch.nn.Module(), Graph()
    for name, number in data["tensors"].items():
        set_buffer(root, name, tensors[number])
    made: list[Node] = []
    for op, target, args, kwargs in data["nodes"]:
        made.append(_make(graph, op, target, _nodes(args, made), _nodes(kwargs, made)))
    return with_graph(root, graph, data["tensors"])


def _node_to_data(node: Node, positions: Mapping[Node, int]) -> list[Any]:
    target: Any = str(node.target)
    if node.op == "call_function":
        target = _target_name(node)
    elif node.op not in {"placeholder", "get_attr", "output"}:
        raise ModelFileError(f"{node.op} cannot be saved", where=str(place_of(node)))
    try:
        return [node.op, target, *(_arguments(v, positions) for v in (node.args, node.kwargs))]
    except UnknownValueError as error:
        raise ModelFileError(
            f"an argument of {node.target} is {error}, which cannot be saved",
            where=str(place_of(node)),
        ) from error


def _target_name(node: Node) -> str:
    if isinstance(node.target, OpOverload):
        return str(node.target)
    name = _NAMES.get(node.target)
    if name is None:
        raise ModelFileError(
            f"the graph calls {node.target}, which is not an operator that can be saved",
            where=str(place_of(node)),
            fix="register the function as an operator with torch.library.custom_op",
        )
    return name


def _arguments(value: Any, positions: Mapping[Node, int]) -> Any:
    """Return arguments with ``{"$node": position}`` in place of nodes."""
    match value:
        case Node():
            return {"$node": positions[value]}
        case tuple():
            return {"$tuple": [_arguments(item, positions) for item in value]}
        case list():
            return [_arguments(item, positions) for item in value]
        case dict():
            return {str(key): _arguments(item, positions) for key, item in value.items()}
        case slice():
            return {
                "$slice": [_arguments(v, positions) for v in (value.start, value.stop, value.step)]
            }
        case _:
            return to_data(value)


def _nodes(data: Any, made: list[Node]) -> Any:
    match data:
        case {"$node": position}:
            return made[position]
        case {"$tuple": items}:
            return tuple(_nodes(item, made) for item in items)
        case {"$slice": parts}:
            return slice(*(_nodes(part, made) for part in parts))
        case list():
            return [_nodes(item, made) for item in data]
        case dict() if not any(key.startswith("$") for key in data):
            return {key: _nodes(item, made) for key, item in data.items()}
        case _:
            return from_data(data)


def _make(graph: Graph, op: str, target: str, args: Any, kwargs: Any) -> Node:
    # FX writes names into the code that it generates, and the arguments by `repr`. A constant of a
    # sequence of modules begins with a digit, as in `0_weight_packed`.
    begin = "_" if op == "get_attr" else ""
    if op != "call_function" and not all(
        f"{begin}{part}".isidentifier() for part in target.split(".")
    ):
        raise ValueError(f"{target!r} is not a name")
    if op not in {"placeholder", "get_attr", "call_function", "output"}:
        raise ValueError(f"a node {op!r}")
    called = _function(target) if op == "call_function" else target
    return graph.create_node(op, called, args, kwargs)


def _function(name: str) -> Any:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    namespace, packet, overload = name.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except (AttributeError, RuntimeError) as error:
        raise ModelFileError(
            f"it calls the operator {name}, which this process does not have",
            fix=f"import the package that defines the operators of {namespace!r} before loading",
        ) from error


def _attribute(module: torch.nn.Module, target: str) -> Any:
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value
