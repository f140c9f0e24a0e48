"""Rewrite a copy of a user's graph, and apply the result atomically."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg


def working_copy(module: GraphModule) -> tuple[GraphModule, dict[Node, Node]]:
    """Return a copy of a module, and the map from the module's nodes to the copy's.

    Constants and fake values are shared.
    """
    # Not `deepcopy`: attributes of the module may not support it.
    graph, twins = Graph(), dict[Node, Node]()
    results = graph.graph_copy(module.graph, twins)
    for output in module.graph.find_nodes(op="output"):
        twins[output] = graph.output(results)
        twins[output].meta = dict(output.meta)
    return GraphModule(module, graph), twins


def apply_to(module: GraphModule, twin: GraphModule, twins: Mapping[Node, Node]) -> None:
    """Apply the rewrites of a copy to ``module``.

    The graph stays the same object, and nodes that were not rewritten stay the same nodes,
    because callers may hold references to them.

    Args:
        module: The module.
        twin: The rewritten copy from :func:`working_copy`.
        twins: The node map from :func:`working_copy`.
    """
    graph = module.graph
    before = list(graph.nodes)
    own = {new: old for old, new in twins.items()}
    behind = _behind(twin.graph, own)
    kept: dict[Node, Node] = {}
    for node in twin.graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), kept.__getitem__)
        old = own.get(node)
        if old is None:
            target = _constant(module, twin, node) if node.op == "get_attr" else node.target
            # Kept nodes keep their order, so a new node fits in front of the next kept one.
            with graph.inserting_before(behind[node]):
                old = graph.create_node(node.op, target, args, kwargs, node.name, node.type)
            old.meta = dict(node.meta)
        else:
            old.args, old.kwargs = args, kwargs
        kept[node] = old
    _erase(graph, before, set(kept.values()))


def _behind(graph: Graph, own: Mapping[Node, Node]) -> dict[Node, Node]:
    """Map each node of the copy to the module's node that it is, or that follows it."""
    found: dict[Node, Node] = {}
    last: Node | None = None
    for node in reversed(graph.nodes):
        last = own.get(node, last)
        assert last is not None, "a graph ends with its output, which stays"
        found[node] = last
    return found


def _constant(module: GraphModule, twin: GraphModule, node: Node) -> str:
    """Register a constant of the copy in the module; return its name there."""
    value = twin.get_buffer(str(node.target))
    name = str(node.target)
    # The user's module may have another attribute of that name.
    while getattr(module, name, value) is not value:
        name += "_"
    if not hasattr(module, name):
        module.register_buffer(name, value)
    return name


def _erase(graph: Graph, before: Iterable[Node], kept: set[Node]) -> None:
    # Users come after their operands, and are erased first.
    for node in reversed(list(before)):
        if node not in kept:
            graph.erase_node(node)
