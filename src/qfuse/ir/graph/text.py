"""A stable text form of a graph. Names are positions, so golden tests do not churn."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument

from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.quant.spec import dtype_name


def to_text(graph: Graph) -> str:
    """Render ``graph`` one node per line, with the tensor type of every value.

    Inputs and constants keep their names; calls are numbered. Symbols are renamed ``s0, s1, ..``
    in the order in which they appear.
    """
    names: dict[Node, str] = {}
    lines: list[str] = []
    size = _Symbols()
    count = 0
    for node in graph.nodes:
        value = node.meta.get("val")
        match node.op:
            case "placeholder" | "get_attr":
                # An input that is a size is named after its symbol.
                is_size = isinstance(value, torch.SymInt)
                names[node] = f"%{size(node.target) if is_size else node.target}"
                mark = "" if node.op == "placeholder" else "const "
                lines.append(f"{mark}{names[node]}: {type_text(value, size)}")
            case "output":
                lines.append(f"return {_arg(node.args[0], names, size)}")
            case _:
                names[node] = f"%{count}"
                count += 1
                parts = [_arg(a, names, size) for a in node.args]
                parts += [f"{k}={_arg(v, names, size)}" for k, v in node.kwargs.items()]
                call = f"{op_text(node)}({', '.join(parts)})"
                lines.append(f"{names[node]} = {call}: {type_text(value, size)}")
    return "\n".join(lines)


def op_text(node: Node) -> str:
    """Return the short name of the target of ``node``; a plain function has its own name."""
    name = op_name(node)
    # A Python function prints as `<built-in function add>`.
    return getattr(node.target, "__name__", name) if name.startswith("<") else name


def type_text(value: object, size: Callable[[object], str] = str) -> str:
    """Render a (fake) tensor as ``float32[4, s0]``, a tuple of them in parentheses.

    Args:
        value: The tensor or tensors.
        size: Renders one size.
    """
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)}[{', '.join(map(size, value.shape))}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(type_text(each, size) for each in value)})"
    return "?" if value is None else type(value).__name__


def _arg(arg: Argument, names: dict[Node, str], size: Callable[[object], str]) -> str:
    match arg:
        case Node():
            return names[arg]
        case list() | tuple():
            return "(" + ", ".join(_arg(a, names, size) for a in arg) + ")"
        case torch.dtype():
            return dtype_name(arg)
        case torch.SymInt():
            return size(arg)
        case _:
            return repr(arg)


class _Symbols:
    """Numbers symbols by first appearance, because torch's numbers depend on earlier captures."""

    def __init__(self) -> None:
        self._order: dict[str, str] = {}

    def __call__(self, size: object) -> str:
        """Render a size with its symbols renamed."""
        return re.sub(r"\b[su]\d+\b", self._renamed, str(size))

    def _renamed(self, found: re.Match[str]) -> str:
        return self._order.setdefault(found[0], f"s{len(self._order)}")
