"""What it costs to cut a program in two: fusions that are lost, and values that cross."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._ops import OpOverload
from torch.fx import Node

from qfuse.backends.aliases import root_of, viewed_node
from qfuse.backends.layout import size_hint
from qfuse.backends.prepare import Program

Price = tuple[int, int, int]
"""Bytes whose fusion is lost, how many values cross, and how many of them are views."""

# Calls of a library, with which Inductor fuses nothing.
_LIBRARY = frozenset(
    {
        *("linear", "mm", "bmm", "addmm", "baddbmm", "matmul", "convolution", "_int_mm"),
        *("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    }
)


class CutCost:
    """Prices of the cuts of one program."""

    def __init__(self, program: Program, calls: Sequence[Node]) -> None:
        self._values = program.values
        self._calls = calls
        self._places = {node: place for place, node in enumerate(calls)}
        # Two loops are fused only if no call of a library lies between them.
        self._depths: dict[Node, int] = {}
        for node in calls:
            read = (n for n in node.all_input_nodes if n in self._depths)
            self._depths[node] = max((self._depths[n] + (not is_loop(n)) for n in read), default=0)

    def at(self, begin: int, end: int) -> Price | None:
        """Return the price of ending a block of the calls from ``begin`` before ``end``.

        ``None`` if something else than a tensor is read afterwards.
        """
        fused = count = views = 0
        for node in self._calls[begin:end]:
            # What reads only its size has no place.
            later = [n for n in node.users if n.op == "output" or self._places.get(n, begin) >= end]
            if not later:
                continue
            value = self._values.get(node)
            if not isinstance(value, torch.Tensor):
                return None
            count += 1
            views += viewed_node(node) is not None
            if any(self._joined(node, user) for user in later):
                fused += hinted_bytes(value)
        return fused, count, views

    def _joined(self, node: Node, user: Node) -> bool:
        """Whether a compiler could compute both in one loop."""
        made = root_of(node, viewed_node)
        if made not in self._places or not (is_loop(made) and is_loop(user)):
            return False
        return self._depths[made] == self._depths.get(user)


def is_loop(node: Node) -> bool:
    """Whether a compiler makes loops of a call, which it fuses with others."""
    op = node.target
    if not isinstance(op, OpOverload):
        return True
    return op.namespace in {"aten", "prims"} and op.overloadpacket.__name__ not in _LIBRARY


def hinted_bytes(value: torch.Tensor) -> int:
    """Return the bytes of a tensor at the hinted sizes, each element counted."""
    count = value.element_size()
    for size in value.shape:
        count *= size_hint(size)
    return count
