"""The results of modules in captured graphs, and the same places in other graphs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from qfuse.cost import size_range
from qfuse.ir.aten import aten
from qfuse.ir.dtypes import BYTES, COMPUTE_DTYPES
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import MODULE_META, LoweredGraph, StageGraph
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.sizes import Size, same_shape
from qfuse.rewrite.rewriter import origins

# Bounds the way to the next result that is not inside of a fused op.
_MOST = 256
_NORMS = (aten.batch_norm.default, aten._native_batch_norm_legit_no_training.default)


@dataclass(frozen=True, slots=True)
class Layer:
    """One module, and the nodes of its result.

    Attributes:
        path: Its dotted path in the float model.
        reference: The node in the graph of the float model.
        node: The node in the graph of the quantized model.
        after: The first node of the quantized graph, from ``node`` on, that the lowered graph has
            too: fused ops hide the results inside of them. ``None`` if there is none.
        lowered: That node in the lowered graph.
    """

    path: str
    reference: Node
    node: Node
    after: Node | None
    lowered: Node | None


def match_layers(
    reference: StageGraph, quantized: StageGraph, lowered: LoweredGraph
) -> list[Layer]:
    """Return the modules whose results are in both graphs, in the order of the quantized model.

    The result of a convolution whose batch norm was folded into it is that of the batch norm.
    """
    wanted, found = _results(reference.graph), _results(quantized.graph)
    prefix = _prefix(set(wanted), set(found))
    inside = _lowered_nodes(quantized.graph, lowered.graph)
    layers = []
    for path, node in found.items():
        name = path.removeprefix(prefix)
        old = wanted.get(name) if path.startswith(prefix) else None
        if old is None:
            continue
        old = _with_norm(old, found, prefix)
        if _fit(shape_of(old), shape_of(node)):
            after = _first_in(inside, node)
            lowered_node = None if after is None else inside[after.name]
            layers.append(Layer(name, old, node, after, lowered_node))
    return layers


def _results(graph: Graph) -> dict[str, Node]:
    """Return the last float result of every module, by its path."""
    found: dict[str, Node] = {}
    for node in graph.nodes:
        if node.op == "call_function" and MODULE_META in node.meta and _is_float(node):
            found.pop(node.meta[MODULE_META], None)
            found[node.meta[MODULE_META]] = node
    return found


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in COMPUTE_DTYPES


def _is_value(node: Node) -> bool:
    """Whether ``node`` is a float tensor, or one of quantized values."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in {*COMPUTE_DTYPES, *BYTES}


def _prefix(wanted: set[str], found: set[str]) -> str:
    """Return what paths of a wrapped model begin with, such as ``inner.``."""
    starts = {""}
    for path in found:
        parts = path.split(".")
        starts |= {".".join(parts[:count]) + "." for count in range(1, min(3, len(parts)))}

    def hits(start: str) -> tuple[int, int]:
        count = sum(p.startswith(start) and p[len(start) :] in wanted for p in found)
        return count, -len(start)

    return max(sorted(starts), key=hits)


def _with_norm(node: Node, found: dict[str, Node], prefix: str) -> Node:
    """Return the batch norm of a convolution, if the quantized graph lacks it."""
    if len(node.users) != 1:
        return node
    (user,) = node.users
    source = user
    if not is_call(user, *_NORMS):
        return node
    if not _is_float(user):
        parts = [part for part in user.users if _is_float(part) and part.args[1] == 0]
        if not parts:
            return node
        source = parts[0]
    return node if f"{prefix}{user.meta.get(MODULE_META)}" in found else source


def _lowered_nodes(captured: Graph, lowered: Graph) -> dict[str, Node]:
    """Return for names of captured nodes the lowered node that has the same value.

    A lowered node stands for the last one of the nodes that it was made of.
    """
    order = {node.name: index for index, node in enumerate(captured.nodes)}
    captured_nodes = {node.name: node for node in captured.nodes}
    found: dict[str, Node] = {}
    for node in lowered.nodes:
        if node.op != "call_function" or not _is_value(node):
            continue
        known = [name for name in origins(node) if name in order]
        if not known:
            continue
        last = max(known, key=lambda name: order[name])
        source = captured_nodes[last]
        if _is_value(source) and _same_type(source, node):
            found[last] = node
    return found


def _fit(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Whether the shapes are equal, or one of them is the other with leading axes joined."""
    if same_shape(a, b):
        return True
    first, second = ([size_range(size).hint for size in shape] for shape in (a, b))
    if len(first) == len(second) or not first or not second:
        return False
    return first[-1] == second[-1] and math.prod(first) == math.prod(second)


def _first_in(inside: Mapping[str, Node], node: Node) -> Node | None:
    """Return ``node`` if it is in the lowered graph, or else the first node after it that is."""
    below = {node}
    here = node
    for _ in range(_MOST):
        if here in below and here.name in inside:
            return here
        here = here.next
        if here.op == "output":
            return None
        if any(source in below for source in here.all_input_nodes):
            below.add(here)
    return None


def _same_type(a: Node, b: Node) -> bool:
    return dtype_of(a) == dtype_of(b) and same_shape(shape_of(a), shape_of(b))
