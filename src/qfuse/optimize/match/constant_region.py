"""The parts of a graph that depend on constants only."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from qfuse.ir.graph.alias import leaves_graph
from qfuse.ir.graph.memory import address_of
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.graph.stage_graph import MUTABLE_META, StageGraph, constant_of
from qfuse.ir.ops.pure import folds_exactly
from qfuse.rewrite.prelude import Miss, MissCode, Node


@dataclass(slots=True)
class ConstantRegions:
    """The nodes that are computed from constants, by the largest constant that they depend on.

    Attributes:
        homes: For each such node its largest constant, itself for a constant; ``None`` for a
            tensor that an op creates, such as ``aten.full``.
        ends: By constant, the nodes computed from it that have users outside.
    """

    homes: dict[Node, Node | None] = field(default_factory=dict)
    ends: dict[Node, list[Node]] = field(default_factory=dict)

    @staticmethod
    def of(program: StageGraph) -> ConstantRegions:
        """Find all regions, in one sweep."""
        found = ConstantRegions()
        written = frozenset(_written(program))
        for node in program.graph.nodes:
            found._add(node, written)
        for node, home in found.homes.items():
            if home is not None and home is not node and found._is_end(node):
                found.ends.setdefault(home, []).append(node)
        return found

    def groups(self) -> Iterator[tuple[Node, list[Node], Miss | None]]:
        """Yield each constant with its ends, and why these may not be folded.

        They may be if all of them together take no more memory than the constant, and if nothing
        else keeps the constant in memory.
        """
        reached = {home: self._reached(home) for home in self.ends}
        refused: dict[Node, Miss] = {}
        for home in self.ends:
            miss = self._refusal(home)
            if miss is not None:
                refused[home] = miss
        # An end that stays keeps all constants that it depends on.
        waiting = list(refused)
        stays = {end for home in waiting for end in self.ends[home]}
        while waiting:
            waiting = [
                h for h in self.ends if h not in refused and not stays.isdisjoint(reached[h])
            ]
            for home in waiting:
                refused[home] = _shared(self.ends[home][0], home)
                stays.update(self.ends[home])
        for home, ends in self.ends.items():
            yield home, ends, refused.get(home)

    def shared_views(self, home: Node) -> bool:
        """Whether views of ``home`` overlap, so that copies of them would be larger than it."""
        return sum(map(held_bytes, filter(_is_view, self.ends[home]))) > held_bytes(home)

    def _add(self, node: Node, written: frozenset[int]) -> None:
        if node.op == "get_attr":
            value = constant_of(node)
            if value is not None and address_of(value) not in written:
                self.homes[node] = node
            return
        inputs = node.all_input_nodes
        if node.op != "call_function" or not folds_exactly(node):
            return
        if any(n not in self.homes for n in inputs) or leaves_graph(node):
            return
        if all(map(_is_plain, _tensors(node))):
            sources = [home for home in map(self.homes.__getitem__, inputs) if home is not None]
            self.homes[node] = max(sources, key=held_bytes, default=None)

    def _is_end(self, node: Node) -> bool:
        return any(user not in self.homes for user in node.users)

    def _refusal(self, home: Node) -> Miss | None:
        """Return why the ends of ``home`` would be larger than it, or why it would stay."""
        ends = self.ends[home]
        if self._is_end(home):
            return _shared(ends[0], home)
        views = sum(held_bytes(end) for end in ends if _is_view(end))
        took = held_bytes(home)
        takes = min(views, took) + sum(held_bytes(end) for end in ends if not _is_view(end))
        if takes <= took:
            return None
        text = "it is computed from %{} in every call: as a constant it would take {} bytes, not {}"
        return Miss(MissCode.SHAPE, ends[0], text, home.name, takes, took, progress=1)

    def _reached(self, home: Node) -> set[Node]:
        """Return the ends, of any constant, that depend on ``home``."""
        seen: set[Node] = set()
        stack = [home]
        while stack:
            new = [u for u in stack.pop().users if u in self.homes and u not in seen]
            seen.update(new)
            stack += new
        return {node for node in seen if self._is_end(node)}


def _shared(end: Node, home: Node) -> Miss:
    text = "it is computed from %{} in every call: %{} has other users, so it would be stored twice"
    return Miss(MissCode.SHARED, end, text, home.name, home.name, progress=1)


def _written(program: StageGraph) -> Iterable[int]:
    """Yield the addresses of the buffers that the model writes."""
    for node in program.graph.find_nodes(op="get_attr"):
        if node.meta.get(MUTABLE_META):
            yield address_of(program.module.get_buffer(str(node.target)))
    for mutation in program.signature.mutations:
        if mutation.buffer is not None and hasattr(program.module, mutation.buffer):
            yield address_of(program.module.get_buffer(mutation.buffer))


def _tensors(node: Node) -> list[object]:
    value = node.meta.get("val")
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _is_plain(value: object) -> bool:
    """Whether ``value`` is a tensor of known size, each of whose elements has its own memory."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    sizes = list(zip(value.shape, value.stride(), strict=True))
    known = all(isinstance(number, int) for pair in sizes for number in pair)
    return known and not any(stride == 0 and size > 1 for size, stride in sizes)


def _is_view(node: Node) -> bool:
    """Whether ``node`` is a view of a constant, through any number of views."""
    while node.op != "get_attr":
        op = overload_of(node)
        if node.target is not operator.getitem and not (op is not None and op.is_view):
            return False
        inputs = node.all_input_nodes
        if not inputs:
            return False
        node = inputs[0]
    return True


def held_bytes(node: Node) -> int:
    """Return the memory that the tensors of ``node`` take."""
    found = [value for value in _tensors(node) if isinstance(value, torch.Tensor)]
    return sum(math.prod(value.shape) * value.element_size() for value in found)
