"""A stable text form of a graph. Names are positions, so golden tests do not churn."""

from __future__ import annotations

import re

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
    count = 0
    for node in graph.nodes:
        match node.op:
            case "placeholder" | "get_attr":
                names[node] = f"%{node.target}"
                mark = "" if node.op == "placeholder" else "const "
                lines.append(f"{mark}{names[node]}: {type_text(node.meta.get('val'))}")
            case "output":
                lines.append(f"return {_arg(node.args[0], names)}")
            case _:
                names[node] = f"%{count}"
                count += 1
                parts = [_arg(a, names) for a in node.args]
                parts += [f"{k}={_arg(v, names)}" for k, v in node.kwargs.items()]
                call = f"{op_text(node)}({', '.join(parts)})"
                lines.append(f"{names[node]} = {call}: {type_text(node.meta.get('val'))}")
    return _rename_symbols("\n".join(lines))


def op_text(node: Node) -> str:
    """Return the short name of the target of ``node``; a plain function has its own name."""
    name = op_name(node)
    return getattr(node.target, "__name__", name) if name.startswith("<") else name


def type_text(value: object) -> str:
    """Render a (fake) tensor as ``float32[4, s0]``, a tuple of them in parentheses."""
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(type_text, value))})"
    return "?" if value is None else type(value).__name__


def _arg(arg: Argument, names: dict[Node, str]) -> str:
    match arg:
        case Node():
            return names[arg]
        case list() | tuple():
            return "(" + ", ".join(_arg(a, names) for a in arg) + ")"
        case torch.dtype():
            return dtype_name(arg)
        case _:
            return repr(arg)


def _rename_symbols(text: str) -> str:
    """Number symbols by first appearance, because torch's numbers depend on earlier captures."""
    order: dict[str, str] = {}

    def rename(found: re.Match[str]) -> str:
        return order.setdefault(found[0], f"s{len(order)}")

    return re.sub(r"\b[su]\d+\b", rename, text)
