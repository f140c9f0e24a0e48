"""Parts of a program that enable gradients, which no compiled model computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from qfuse.capture._export_api import higher_order_name

_ORIGIN = ("stack_trace", "nn_module_stack")


@contextmanager
def without_grad(program: ExportedProgram) -> Iterator[None]:
    """Disable gradients in the parts of a program that enable them, for a while.

    torch would make a graph of such a part that computes gradients too, and fail with an
    IndexError. The ops of a part get the line of its first one.
    """
    found = [
        (module, node)
        for module in program.graph_module.modules()
        if isinstance(module, GraphModule)
        for node in module.graph.nodes
        if higher_order_name(node) == "wrap_with_set_grad_enabled" and node.args[0] is True
    ]
    before = [dict(node.meta) for _, node in found]
    for module, node in found:
        node.meta |= _origin(module, node)
    _enable_grad(found, enabled=False)
    try:
        yield
    finally:
        _enable_grad(found, enabled=True)
        for (_, node), meta in zip(found, before, strict=True):
            node.meta = meta


def _origin(module: GraphModule, part: Node) -> dict[str, object]:
    """Return the line and the module of the first op of a part."""
    inner = module.get_submodule(str(getattr(part.args[1], "target", "")))
    assert isinstance(inner, GraphModule), "the part is a graph"
    metas = [node.meta for node in inner.graph.nodes if node.meta.get("stack_trace")]
    return {name: metas[0][name] for name in _ORIGIN if name in metas[0]} if metas else {}


def _enable_grad(nodes: list[tuple[GraphModule, Node]], *, enabled: bool) -> None:
    for module, node in nodes:
        node.args = (enabled, *node.args[1:])
        module.recompile()
