"""Buffers of graph modules, which FX copies only where the graph reads them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Graph, GraphModule


def set_buffer(root: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    """Register a buffer by its path; modules on the way are made."""
    *owners, attribute = name.split(".")
    for owner in owners:
        if owner not in dict(root.named_children()):
            root.add_module(owner, torch.nn.Module())
        root = root.get_submodule(owner)
    root.register_buffer(attribute, value)


def with_graph(root: torch.nn.Module, graph: Graph, written: Iterable[str | None]) -> GraphModule:
    """Return a module of ``graph`` with the constants of ``root``.

    Args:
        root: The module that has them.
        graph: The graph.
        written: Buffers that the program writes, which its graph may not read; ``None`` is an
            input.
    """
    made = GraphModule(root, graph)
    there = {name for name, _ in made.named_buffers(remove_duplicate=False)}
    for name in written:
        if name is not None and name not in there:
            set_buffer(made, name, root.get_buffer(name))
    return made
