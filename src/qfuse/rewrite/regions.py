"""Connected regions of a graph that could have another memory layout, and their rewrite.

A region grows through every op whose result has the layout when its operands have it. A value
that enters a region is copied, and so is a value that leaves it for a user that depends on its
strides.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from qfuse.cost import hint_of, pointwise_work, size_range
from qfuse.cost.model import CostModel
from qfuse.cost.work import WorkRange
from qfuse.ir.dtypes import bit_width
from qfuse.ir.graph.alias import leaves_graph, may_alias
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.graph.stage_graph import StageGraph, SymbolRange
from qfuse.ir.memory_formats import format_of
from qfuse.ir.ops.views import result_of, tensor_of
from qfuse.ir.sizes import axis_order, inverse, is_row_major, same_shape, same_strides
from qfuse.rewrite.rewriter import Rewriter

aten = torch.ops.aten

Infer = Callable[[Any, Any, Any], Any]
"""Returns the fake result of an op for fake arguments."""

_NAMESPACES = frozenset({"aten", "prims", "qfuse"})
# Ops that address memory, and numbers that describe it.
_OF_MEMORY = frozenset(
    {
        aten.as_strided,
        aten.as_strided_copy,
        aten.as_strided_scatter,
        aten.sym_stride,
        aten.sym_storage_offset,
    }
)


@dataclass(slots=True)
class Region:
    """Connected nodes that can have another layout together.

    Attributes:
        nodes: The nodes with the users that need the strides of before, in the order of the graph.
        entries: The nodes with the operands from outside that are copied for them.
    """

    nodes: dict[Node, list[Node]] = field(default_factory=dict)
    entries: dict[Node, list[Node]] = field(default_factory=dict)

    @property
    def can_be_left(self) -> bool:
        """Whether a copy can restore the strides of all values that leave."""
        leaving = [node.meta["val"] for node, users in self.nodes.items() if users]
        return all(isinstance(x, torch.Tensor) and _order_of(x) is not None for x in leaving)

    @property
    def copies(self) -> list[Node]:
        """The values that are copied at the border."""
        entering = dict.fromkeys(e for entries in self.entries.values() for e in entries)
        return [*entering, *(node for node, users in self.nodes.items() if users)]


class RegionSearch(ABC):
    """Finds the regions for one layout; goes through the graph once, in its order.

    Args:
        infer: Returns fake results.
    """

    def __init__(self, infer: Infer) -> None:
        self._infer = infer
        # The values that the nodes of regions would have.
        self._values: dict[Node, Any] = {}
        self._entries: dict[Node, list[Node]] = {}
        # Results outside of regions with other strides on axes of size 1 alone, which some read.
        self._moved: dict[Node, Any] = {}

    @abstractmethod
    def starts(self, node: Node) -> bool:
        """Whether a region may start at ``node``."""

    @abstractmethod
    def format(self, rank: int) -> torch.memory_format | None:
        """Return the layout for tensors of ``rank`` axes, if there is one."""

    @abstractmethod
    def enters(self, value: torch.Tensor) -> bool:
        """Whether an operand from outside, which :meth:`format` exists for, has to be copied."""

    @abstractmethod
    def changes(self, before: torch.Tensor, after: torch.Tensor) -> bool:
        """Whether a result gets the layout."""

    def operands(self, node: Node) -> Sequence[Node]:
        """Return the operands of ``node``."""
        return node.all_input_nodes

    def is_in_region(self, node: Node) -> bool:
        """Whether ``node`` is made again with a region."""
        return node in self._values

    def regions(self, program: StageGraph) -> list[Region]:
        """Return all regions, also those that cannot be left."""
        for node in program.graph.nodes:
            operands = self.operands(node)
            if self.starts(node) or any(operand in self._values for operand in operands):
                self.visit(node)
            elif any(operand in self._moved for operand in operands) and ignores_strides(node):
                self._note_moved(node)
        return [self._region(nodes) for nodes in self._components(program)]

    def visit(self, node: Node) -> None:
        """Add ``node`` if its result gets the layout when its operands have it."""
        before = _tensors(node.meta.get("val"))
        if not before or not ignores_strides(node):
            return
        entries = [o for o in node.all_input_nodes if self._has_to_enter(o, before[0].dim())]
        value = self._result(node, entries)
        if self._become(before, _tensors(value)):
            self.add(node, value, entries)
        else:
            self._note_moved(node)

    def add(self, node: Node, value: Any, entries: list[Node]) -> None:
        """Add ``node`` with the value that it will have, and the operands to copy."""
        self._values[node], self._entries[node] = value, entries

    def arranged(self, value: torch.Tensor) -> torch.Tensor:
        """Return a fake copy of ``value`` in the layout."""
        memory_format = self.format(value.dim())
        assert memory_format is not None, "only such values enter"
        with torch.no_grad():
            return value.clone(memory_format=memory_format)

    def _become(self, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> bool:
        """Whether some results get the layout, and nothing else changes.

        The other results are such as the statistics of a batch norm.
        """
        if len(before) != len(after):
            return False
        pairs = list(zip(before, after, strict=True))
        return any(self.changes(old, new) for old, new in pairs) and all(
            same_shape(old.shape, new.shape) and (self.changes(old, new) or same_strides(old, new))
            for old, new in pairs
        )

    def _note_moved(self, node: Node) -> None:
        before, value = node.meta.get("val"), self._result(node)
        if _same(before, value) and not _same_everywhere(before, value):
            self._moved[node] = value

    def _has_to_enter(self, operand: Node, rank: int) -> bool:
        """Whether an operand is an activation in another layout."""
        value = operand.meta.get("val")
        if operand in self._values or operand.op == "get_attr":
            return False
        if not isinstance(value, torch.Tensor) or value.dim() != rank:
            return False
        return self.format(rank) is not None and self.enters(value)

    def _result(self, node: Node, entries: Sequence[Node] = ()) -> Any:
        """Return the result for the new values of the operands; ``None`` if there is none."""
        entering = {e: self.arranged(e.meta["val"]) for e in entries}

        def value(operand: Node) -> Any:
            old = operand.meta["val"]
            moved = self._values.get(operand, self._moved.get(operand, old))
            return entering.get(operand, moved)

        if node.op != "call_function":
            return None
        args, kwargs = map_arg((node.args, node.kwargs), value)
        try:
            return self._infer(node.target, args, kwargs)
        except (RuntimeError, TypeError, ValueError, LookupError, AssertionError):
            # Such as a view that the new strides do not allow.
            return None

    def _components(self, program: StageGraph) -> list[list[Node]]:
        """Return the connected nodes; nodes that copy the same value are connected by it."""
        first: dict[Node, Node] = {node: node for node in self._values}

        def root(node: Node) -> Node:
            while first[node] is not node:
                first[node] = first[first[node]]
                node = first[node]
            return node

        copied: dict[Node, Node] = {}
        for node in self._values:
            near = [o for o in self.operands(node) if o in self._values]
            near += [copied.setdefault(entry, node) for entry in self._entries[node]]
            for other in near:
                first[root(node)] = root(other)
        groups: dict[Node, list[Node]] = {}
        for node in program.graph.nodes:
            if node in self._values:
                groups.setdefault(root(node), []).append(node)
        return list(groups.values())

    def _region(self, nodes: Iterable[Node]) -> Region:
        region = Region()
        for node in nodes:
            region.nodes[node] = [user for user in node.users if self._depends(user, node)]
            region.entries[node] = self._entries[node]
        return region

    def _depends(self, user: Node, node: Node) -> bool:
        """Whether a user of ``node`` outside of all regions depends on its strides."""
        if self.is_in_region(user) or _same(node.meta["val"], self._values[node]):
            return False
        # A reshape that is returned may be a view of the new value, and was a copy before.
        returned = may_alias(user) and leaves_graph(user)
        return user.op == "output" or returned or self._reads_strides(user)

    def _reads_strides(self, user: Node) -> bool:
        """Whether a value outside of all regions has other strides because ``user`` does.

        A pool of one pixel has other strides on axes of size 1, and the op that reads them returns
        larger axes.
        """
        seen, left = {user}, [user]
        while left:
            node = left.pop()
            if not ignores_strides(node) or not _same(node.meta.get("val"), self._result(node)):
                return True
            if node in self._moved:
                readers = [u for u in node.users if u.op != "output" and not self.is_in_region(u)]
                left += [reader for reader in readers if reader not in seen]
                seen.update(readers)
        return False


class RegionRewrite:
    """Makes the nodes of a region again, in its layout.

    Args:
        region: The region.
        search: What found it.
    """

    def __init__(self, region: Region, search: RegionSearch) -> None:
        self._region = region
        self._search = search
        # Copies of the values that enter, by value.
        self._copies: dict[Node, Node] = {}

    def apply(self, rw: Rewriter) -> None:
        """Repeat every node on operands in the layout, and copy the values that leave."""
        for node, leaving in self._region.nodes.items():
            with rw.instead_of(node):
                made = self.made_again(node, rw)
                if leaving:
                    stays = [user for user in node.users if user not in leaving]
                    rw.replace(node, _restored(made, tensor_of(node), rw), but=stays)
                rw.replace(node, made)

    def made_again(self, node: Node, rw: Rewriter) -> Node:
        """Make the same call of the new operands."""
        entering = {entry: self._copy(entry, rw) for entry in self._region.entries[node]}
        args, kwargs = map_arg((node.args, node.kwargs), lambda o: entering.get(o, o))
        op, item = overload_of(node), result_of(node)
        if op is not None:
            return rw.call(op, *args, **kwargs)
        assert item is not None, "the only other call"
        return rw.item(*item)

    def _copy(self, entry: Node, rw: Rewriter) -> Node:
        if entry not in self._copies:
            wanted = self._search.format(tensor_of(entry).dim())
            self._copies[entry] = rw.call(aten.clone.default, entry, memory_format=wanted)
        return self._copies[entry]


def copy_seconds(
    copied: Iterable[Node], cost: CostModel, symbols: Mapping[str, SymbolRange]
) -> float:
    """Predict the time of copying values."""
    plan: list[WorkRange] = []
    for node in copied:
        value = tensor_of(node)
        bits = bit_width(value.dtype)
        plan.append(pointwise_work(size_range(value.numel(), symbols), [bits], [bits]))
    return cost.seconds(plan) if plan else 0.0


def ignores_strides(node: Node) -> bool:
    """Whether ``node`` computes the same values for operands with other strides."""
    if node.target is operator.getitem:
        return True
    op = overload_of(node)
    if op is None or op.namespace not in _NAMESPACES:
        return False
    if torch.Tag.nondeterministic_seeded in op.tags:
        # Random numbers are drawn in the order of memory.
        return False
    return op.overloadpacket not in _OF_MEMORY


def _order_of(value: torch.Tensor) -> tuple[int, ...] | None:
    """Return the axes of a dense tensor in the order of memory; ``None`` if that is not certain."""
    if value.layout is not torch.strided:
        return None
    order = axis_order([*map(hint_of, value.shape)], [*map(hint_of, value.stride())])
    # That of the traced sizes may not be that of others.
    return order if order is not None and is_row_major(value.permute(order)) else None


def _restored(made: Node, before: torch.Tensor, rw: Rewriter) -> Node:
    """Copy ``made`` to the strides of ``before``."""
    memory_format = format_of(before)
    if memory_format is not None:
        return rw.call(aten.clone.default, made, memory_format=memory_format)
    order = _order_of(before)
    assert order is not None, "other values do not leave"
    return cloned_in_order(made, order, rw)


def cloned_in_order(made: Node, order: Sequence[int], rw: Rewriter) -> Node:
    """Copy ``made`` to dense memory that has its axes in ``order``."""
    turned = rw.call(aten.permute.default, made, list(order))
    dense = rw.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
    return rw.call(aten.permute.default, dense, list(inverse(order)))


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a result if all its parts are tensors."""
    parts = [value] if isinstance(value, torch.Tensor) else value
    if not isinstance(parts, (list, tuple)):
        return []
    return list(parts) if all(isinstance(part, torch.Tensor) for part in parts) else []


def _same(before: Any, after: Any) -> bool:
    """Whether two results have the same strides."""
    old, new = _tensors(before), _tensors(after)
    if not old or len(old) != len(new):
        return isinstance(before, (int, float, torch.SymInt)) and type(before) is type(after)
    return all(same_strides(a, b) for a, b in zip(old, new, strict=True))


def _same_everywhere(before: Any, after: Any) -> bool:
    """Whether two results have the same strides, on axes of size 1 too."""
    pairs = zip(_tensors(before), _tensors(after), strict=True)
    return all(same_shape(a.stride(), b.stride()) for a, b in pairs)
