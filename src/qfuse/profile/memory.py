"""Memory over time: the bytes of the values of a graph between their first and last use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Graph, Node

from qfuse.ir.graph.alias import memory_of
from qfuse.snapshots import byte_count

_NOT_MADE = frozenset({"placeholder", "get_attr", "output"})


@dataclass(frozen=True, slots=True)
class LiveBytes:
    """The bytes of the values that a graph has made and still needs.

    Attributes:
        node: Name of the node.
        during: With the node's result, before operands are freed that it uses last.
        after: After they are freed.
    """

    node: str
    during: int
    after: int


def live_bytes(graph: Graph, sizes: Mapping[str, int] | None = None) -> tuple[LiveBytes, ...]:
    """Return the live bytes at each call of ``graph``, in order.

    Inputs and constants belong to the caller and are not counted; views belong to the value that
    they view. Outputs stay until the end. Compiled code reuses buffers and fuses values away, so it
    needs at most this much.

    Args:
        graph: The graph.
        sizes: Bytes of the result of each node; the default is that of the traced sizes.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    owners = {node: memory_of(node) for node in graph.nodes}
    last = dict.fromkeys(order, 0)
    for node, index in order.items():
        last[owners[node]] = max(last[owners[node]], index, *(order[u] for u in node.users))
    dying: dict[int, list[Node]] = {}
    for node in order:
        if owners[node] is node and node.op not in _NOT_MADE:
            dying.setdefault(last[node], []).append(node)
    own = {n: _bytes(n, sizes) for nodes in dying.values() for n in nodes}
    points, now = list[LiveBytes](), 0
    for node, index in order.items():
        if node.op != "call_function":
            continue
        now += own.get(node, 0)
        during = now
        now -= sum(own[dead] for dead in dying.get(index, ()))
        points.append(LiveBytes(node.name, during, now))
    return tuple(points)


def _bytes(node: Node, sizes: Mapping[str, int] | None) -> int:
    if sizes is not None and node.name in sizes:
        return sizes[node.name]
    return byte_count(node.meta.get("val")) or 0
