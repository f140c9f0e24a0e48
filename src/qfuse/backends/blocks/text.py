"""Texts of nodes that are equal where nodes do the same, whatever they are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from qfuse.backends.layout import Layout
from qfuse.backends.prepare import Program

Values = Mapping[Node, Any]
"""The value of each node: a fake tensor, a size, or a sequence of these."""


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One of the places at which a block occurs.

    Attributes:
        nodes: Its calls, in order.
        outside: The values that it reads and that are computed elsewhere, in order of first use.
        constants: The names of its constants, in order of first use.
        text: What it does: equal for blocks that one compiled library can run.
    """

    nodes: tuple[Node, ...]
    outside: tuple[Node, ...]
    constants: tuple[str, ...]
    text: tuple[str, ...]


def read_occurrence(program: Program, nodes: Sequence[Node]) -> Occurrence:
    """Return consecutive nodes with what they read, and their text."""
    local = {node: f"%{index}" for index, node in enumerate(nodes)}
    outside: dict[Node, str] = {}
    constants: dict[str, str] = {}

    def name(node: Node) -> str:
        if node in local:
            return local[node]
        if node.op == "get_attr" and str(node.target) in program.constants:
            known = constants.setdefault(str(node.target), f"c{len(constants)}")
            return f"{known} {value_text(program.constants[str(node.target)], exact=True)}"
        value = program.values.get(node)
        if isinstance(value, torch.SymInt):
            return value_text(value)
        if node.op == "get_attr":
            return f"graph {node.target}"
        known = outside.setdefault(node, f"#{len(outside)}")
        return f"{known} {value_text(value)} {_order(value)}"

    text = tuple(_call_text(node, program.values, name) for node in nodes)
    return Occurrence(tuple(nodes), tuple(outside), tuple(constants), text)


def loose_text(program: Program, node: Node) -> str:
    """Return a text of a node without where its operands come from."""

    def name(operand: Node) -> str:
        if operand.op == "get_attr" and str(operand.target) in program.constants:
            return f"c {value_text(program.constants[str(operand.target)], exact=True)}"
        return value_text(program.values.get(operand))

    return _call_text(node, program.values, name)


def value_text(value: object, *, exact: bool = False) -> str:
    """Return dtype and shape of a value, and its strides if ``exact``."""
    if isinstance(value, torch.Tensor):
        shape = ", ".join(map(_size, value.shape))
        strides = f"({', '.join(map(_size, value.stride()))})" if exact else ""
        return f"{value.dtype}[{shape}]{strides}"
    if isinstance(value, torch.SymInt):
        return f"size {value.node.expr}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(value_text, value)) + ")"
    return repr(value)


def _call_text(node: Node, values: Values, name: Callable[[Node], str]) -> str:
    arguments = f"{_argument(node.args, name)} {_argument(node.kwargs, name)}"
    return f"{node.op} {node.target} {arguments} -> {value_text(values.get(node))}"


def _argument(value: object, name: Callable[[Node], str]) -> str:
    match value:
        case Node():
            return name(value)
        case torch.SymInt():
            return value_text(value)
        case tuple() | list():
            inner = ", ".join(_argument(item, name) for item in value)
            return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
        case dict():
            items = (f"{key}: {_argument(item, name)}" for key, item in sorted(value.items()))
            return "{" + ", ".join(items) + "}"
        case slice():
            return f"slice{_argument((value.start, value.stop, value.step), name)}"
        case _:
            return repr(value)


def _size(size: int | torch.SymInt) -> str:
    return str(size) if isinstance(size, int) else str(size.node.expr)


def _order(value: object) -> str:
    return f"order {Layout.of(value).order}" if isinstance(value, torch.Tensor) else ""
