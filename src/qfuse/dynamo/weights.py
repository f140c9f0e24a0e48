"""Turn a graph of Dynamo, whose weights are inputs, into a module that holds them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from qfuse.capture.provenance import UserFiles, source_line
from qfuse.dynamo._dynamo_api import (
    attribute_name,
    control_flow,
    input_name,
    is_static,
    plain_path,
    size_text,
    sizes_of_inputs,
    traced_value,
)
from qfuse.ir.errors import CaptureError


@dataclass(frozen=True, slots=True)
class BoundGraph:
    """A module made of a graph of Dynamo.

    Attributes:
        module: The module; weights are its buffers and share memory with the user's.
        inputs: Its example inputs.
        dynamic_shapes: The sizes that may vary, in the format of ``torch.export``.
        keep: Positions of its inputs among those of the graph.
        held: Positions of the inputs of the graph that it holds, by the name of the buffer.
    """

    module: GraphModule
    inputs: tuple[torch.Tensor, ...]
    dynamic_shapes: tuple[dict[int, Any], ...]
    keep: tuple[int, ...]
    held: dict[str, int]


def bind_weights(
    source: GraphModule,
    example: Sequence[Any],
    returned: Sequence[Any],
    loose: Collection[int] = (),
) -> BoundGraph:
    """Bind the static inputs of ``source``, which is not changed.

    Args:
        source: The graph of Dynamo.
        example: Its inputs: tensors, and sizes where these vary.
        returned: The nodes to return instead of its results.
        loose: Positions of static inputs that stay inputs.

    Raises:
        CaptureError: The graph has an input that is neither a tensor nor a size of one.
    """
    _refuse_control_flow(source.graph)
    graph = Graph()
    copies: dict[Node, Node] = {}
    held: dict[str, int] = {}
    attributes: dict[str, Any] = {}
    keep: list[int] = []
    sizes: list[Node] = []
    placeholders = source.graph.find_nodes(op="placeholder")
    for position, (node, value) in enumerate(zip(placeholders, example, strict=True)):
        if not isinstance(value, torch.Tensor):
            sizes.append(node)
        elif is_static(node) and position not in loose:
            name = _free_name(attribute_name(node), attributes)
            held[name] = position
            # Not a parameter: nothing requires grad here.
            attributes[name] = value.detach() if value.requires_grad else value
        else:
            keep.append(position)
            copies[node] = graph.create_node("placeholder", node.name, name=input_name(node))
            # FX makes names unique, and renames those that generated code uses, such as `torch`.
            copies[node].target = copies[node].name
            copies[node].meta = dict(node.meta)
    for name, position in held.items():
        copies[placeholders[position]] = graph.get_attr(name)
    kept = [placeholders[i] for i in keep]
    for node in sizes:
        if node.users:
            copies[node] = _size(node, kept, copies, graph)
    for node in source.graph.nodes:
        if node.op in {"placeholder", "output"}:
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta |= _modules_of(node)
        if node.op in {"get_attr", "call_module"}:
            attributes[str(node.target)] = _attribute(source, str(node.target))
    graph.output(tuple(copies[node] if isinstance(node, Node) else node for node in returned))
    return BoundGraph(
        GraphModule(attributes, graph, class_name="DynamoGraph"),
        tuple(example[i] for i in keep),
        tuple(_dynamic_axes(node) for node in kept),
        tuple(keep),
        held,
    )


def _refuse_control_flow(graph: Graph) -> None:
    # torch.export fails on some, with words of its own.
    for node in graph.nodes:
        what = control_flow(node)
        if what is not None:
            raise CaptureError(
                f"the model calls {node.target}, {what}",
                where=source_line(node.meta.get("stack_trace"), UserFiles()),
                fix="use torch.where instead of a branch, or break the graph around it with "
                "torch._dynamo.graph_break()",
            )


def _size(node: Node, tensors: Sequence[Node], copies: dict[Node, Node], graph: Graph) -> Node:
    """Return the node of a size, taken from the tensor that has it."""
    size = traced_value(node)
    found = (
        sizes_of_inputs(tensors).get(size_text(size)) if isinstance(size, torch.SymInt) else None
    )
    if found is not None:
        return graph.call_function(
            torch.ops.aten.sym_size.int, (copies[tensors[found[0]]], found[1])
        )
    raise CaptureError(
        f"the graph takes {input_name(node)}, a number that varies and is not the size of a tensor",
        fix="pass it as a tensor, or give it one value",
    )


def _modules_of(node: Node) -> dict[str, Any]:
    """Return the modules around a node with their names in the user's module."""
    stack = node.meta.get("nn_module_stack") or {}
    return {
        "nn_module_stack": {key: (plain_path(path), kind) for key, (path, kind) in stack.items()}
    }


def _dynamic_axes(node: Node) -> dict[int, Any]:
    shape = traced_value(node).shape
    return {axis: Dim.AUTO for axis, size in enumerate(shape) if not is_concrete_int(size)}


def _free_name(name: str, taken: dict[str, Any]) -> str:
    """Return a name so that neither it nor another one is a prefix of the other."""
    clashes = any(
        name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.")
        for other in taken
    )
    return f"{name.replace('.', '_')}_{len(taken)}" if clashes else name


def _attribute(module: torch.nn.Module, target: str) -> Any:
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value
