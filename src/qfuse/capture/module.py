"""A traced program as a plain module."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from qfuse.capture._export_api import as_value
from qfuse.capture.numbers import known_numbers
from qfuse.ir.aten import aten

# What the code that FX generates means by these names, a parameter of the same name would hide.
_HIDDEN = ("NoneType", "device", "fx_pytree", "inf", "nan", "pytree", "torch")


def renamed_inputs(program: ExportedProgram) -> dict[str, str]:
    """Return new names for the placeholders that cannot keep theirs."""
    taken = {node.name for node in program.graph.nodes}
    renamed: dict[str, str] = {}
    for name in _HIDDEN:
        if name in taken:
            renamed[name] = next(
                new for i in itertools.count(1) if (new := f"{name}_{i}") not in taken
            )
    return renamed


def build_module(
    program: ExportedProgram,
    constants: Mapping[str, tuple[str, torch.Tensor]],
    outputs: Sequence[str],
    kept: Sequence[str],
    copies: Mapping[int, Mapping[str, Any]],
    renamed: Mapping[str, str],
) -> GraphModule:
    """Copy the graph of ``program`` into a plain module with flat inputs and outputs.

    Only the ancestors of the outputs are copied, which drops assertions.

    Args:
        program: The functional program.
        constants: Name in the module and value of each placeholder that is a constant.
        outputs: Names of the nodes to return, in order.
        kept: Names of placeholders to keep without users, since they are mutated.
        copies: Positions of ``outputs`` that are returned as copies, with the copies' metadata.
        renamed: New names of placeholders.
    """
    nodes = {node.name: node for node in program.graph.nodes}
    held = {
        node: constants[name][1]
        for name, node in nodes.items()
        if name in constants and name not in kept
    }
    returned = {nodes[name] for name in outputs}
    known = known_numbers(list(nodes.values()), held)
    known = {node: number for node, number in known.items() if node not in returned}
    live = _live([nodes[name] for name in (*outputs, *kept)], known)
    graph = Graph()
    copied: dict[Node, Node] = {}
    placeholders = program.graph.find_nodes(op="placeholder")
    user = [n for n in placeholders if n.name not in constants]
    for node in user:
        # Numbers and strings are constants of the signature; the graph does not read them.
        if isinstance(node.meta.get("val"), torch.Tensor):
            name = renamed.get(node.name, node.name)
            copied[node] = graph.create_node("placeholder", name, name=name)
    made: dict[str, Node] = {}
    for node in placeholders:
        if node in live and node not in copied:
            target = constants[node.name][0]
            # Tied weights are one constant of the graph too.
            if target not in made:
                name = target.replace(".", "_")
                made[target] = graph.create_node("get_attr", target, name=name)
            copied[node] = made[target]
    for node in program.graph.nodes:
        if node in live and node not in copied:
            copied[node] = graph.node_copy(node, lambda n: known[n] if n in known else copied[n])
    for old, new in copied.items():
        new.meta = {**old.meta, "val": as_value(old)}
    results = [copied[nodes[name]] for name in outputs]
    for position, meta in copies.items():
        source = results[position]
        results[position] = graph.call_function(aten.clone.default, (source,))
        results[position].meta = {**meta, "val": source.meta["val"]}
    graph.output(tuple(results))
    values = dict(constants.values())
    return GraphModule({name: values[name] for name in made}, graph, class_name="Captured")


def _live(roots: Sequence[Node], known: Collection[Node]) -> set[Node]:
    """Return the ancestors of ``roots``, but none that are numbers, nor what these are made of."""
    live: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in live and node not in known:
            live.add(node)
            stack += node.all_input_nodes
    return live
