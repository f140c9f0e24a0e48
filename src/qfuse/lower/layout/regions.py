"""Find connected regions of the graph that could be channels-last.

A region grows from quantized convolutions through every op that returns a channels-last result
for channels-last operands. A value that enters a region is copied, and so is a value that leaves
it for a user that depends on its strides.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.graph.stage_graph import StageGraph
from qfuse.ir.memory_formats import channels_last_of, format_of, has_fastest_channels
from qfuse.ir.ops.convolution import FusedConvolution, as_fused_convolution
from qfuse.ir.ops.views import tensor_of
from qfuse.ir.sizes import is_row_major, same_shape, same_size, same_strides
from qfuse.lower.layout.shuffles import Shuffle, find_shuffles

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
# They keep a position in the dtype of the values, which may be too narrow for it.
_POOLS_WITH_INDICES = (aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)


@dataclass(slots=True)
class Region:
    """Connected nodes that can be channels-last together.

    Attributes:
        nodes: The nodes with the users that need the strides of before, in the order of the graph.
        entries: The nodes with the operands from outside that are copied for them.
        shuffles: Those of the nodes that end a channel shuffle.
    """

    nodes: dict[Node, list[Node]] = field(default_factory=dict)
    entries: dict[Node, list[Node]] = field(default_factory=dict)
    shuffles: dict[Node, Shuffle] = field(default_factory=dict)

    @property
    def can_be_left(self) -> bool:
        """Whether a copy can restore the strides of all values that leave."""
        leaving = [node for node, users in self.nodes.items() if users]
        return all(format_of(tensor_of(node)) is not None for node in leaving)

    @property
    def copies(self) -> list[Node]:
        """The values that are copied at the border."""
        entering = dict.fromkeys(e for entries in self.entries.values() for e in entries)
        return [*entering, *(node for node, users in self.nodes.items() if users)]

    @property
    def copies_of_convolutions(self) -> list[Node]:
        """The values that convolutions copy if the region is not channels-last."""
        copies: list[Node] = []
        for node in self.nodes:
            fused = as_fused_convolution(node)
            if fused is not None:
                large = [e for e in fused.extras if e in self.nodes or e in self.entries[node]]
                copies += [fused.x, *large, node]
        return copies


def find_regions(program: StageGraph, infer: Infer) -> list[Region]:
    """Return the regions of ``program``."""
    return _Search(infer, find_shuffles(program.graph.nodes)).run(program)


class _Search:
    """The values that nodes would have, in the order of the graph."""

    def __init__(self, infer: Infer, shuffles: Mapping[Node, Shuffle]) -> None:
        self._infer = infer
        self._shuffles = shuffles
        # The ops inside of shuffles, with the last one.
        self._inside = {node: s.node for s in shuffles.values() for node in s.between}
        self._values: dict[Node, Any] = {}
        self._entries: dict[Node, list[Node]] = {}
        # Results outside of regions with other strides on axes of size 1 alone, which some read.
        self._moved: dict[Node, Any] = {}

    def run(self, program: StageGraph) -> list[Region]:
        for node in program.graph.nodes:
            fused = as_fused_convolution(node)
            starts = fused is not None and _is_quantized(fused)
            operands = self._operands(node)
            if starts or any(operand in self._values for operand in operands):
                self._visit(node)
            elif any(operand in self._moved for operand in operands) and _is_pure(node):
                self._note_moved(node)
        regions = [self._region(nodes) for nodes in self._components(program)]
        return [region for region in regions if region.can_be_left]

    def _operands(self, node: Node) -> list[Node]:
        """Return the operands of a node; a channel shuffle has its image."""
        shuffle = self._shuffles.get(node)
        return node.all_input_nodes if shuffle is None else [shuffle.source]

    def _visit(self, node: Node) -> None:
        """Add ``node`` if its result is channels-last when its operands are."""
        before = _tensors(node.meta.get("val"))
        if not before or not _is_pure(node):
            return
        if node in self._shuffles:
            self._visit_shuffle(node)
            return
        if is_call(node, *_POOLS_WITH_INDICES) and before[0].dtype.itemsize == 1:
            return
        rank = before[0].dim()
        entries = [o for o in node.all_input_nodes if self._has_to_enter(o, rank)]
        value = self._result(node, entries)
        if _become_channels_last(before, _tensors(value)):
            self._values[node], self._entries[node] = value, entries
            return
        self._note_moved(node)

    def _note_moved(self, node: Node) -> None:
        before, value = node.meta.get("val"), self._result(node)
        if _same(before, value) and not _same_everywhere(before, value):
            self._moved[node] = value

    def _visit_shuffle(self, node: Node) -> None:
        """Add a channel shuffle of a channels-last image."""
        shape = node.meta["val"]
        if channels_last_of(shape.dim()) is not None:
            value = _channels_last(shape)
            if _is_channels_last(value):
                self._values[node], self._entries[node] = value, []

    def _has_to_enter(self, operand: Node, rank: int) -> bool:
        """Whether an operand is a row-major activation."""
        value = operand.meta.get("val")
        if operand in self._values or operand.op == "get_attr":
            return False
        if not isinstance(value, torch.Tensor) or value.dim() != rank:
            return False
        return channels_last_of(rank) is not None and not _is_either(value)

    def _result(self, node: Node, entries: Sequence[Node] = ()) -> Any:
        """Return the result for the new values of the operands; ``None`` if there is none."""
        entering = {e: _channels_last(e.meta["val"]) for e in entries}

        def value(operand: Node) -> Any:
            old = operand.meta["val"]
            moved = self._values.get(operand, self._moved.get(operand, old))
            return entering.get(operand, moved)

        if node.op != "call_function":
            return None
        args, kwargs = map_arg((node.args, node.kwargs), value)
        try:
            return self._infer(node.target, args, kwargs)
        except (RuntimeError, ValueError):
            # A view that the new strides do not allow.
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
            near = [o for o in self._operands(node) if o in self._values]
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
            if node in self._shuffles:
                region.shuffles[node] = self._shuffles[node]
        return region

    def _depends(self, user: Node, node: Node) -> bool:
        """Whether a user of ``node`` outside of all regions depends on its strides."""
        if self._is_in_region(user) or _same(node.meta["val"], self._values[node]):
            return False
        return user.op == "output" or self._reads_strides(user)

    def _is_in_region(self, node: Node) -> bool:
        return node in self._values or self._inside.get(node) in self._values

    def _reads_strides(self, user: Node) -> bool:
        """Whether a value outside of all regions has other strides because ``user`` does.

        A pool of one pixel has other strides on axes of size 1, and the op that reads them returns
        larger axes.
        """
        seen, left = {user}, [user]
        while left:
            node = left.pop()
            if not _is_pure(node) or not _same(node.meta.get("val"), self._result(node)):
                return True
            if node in self._moved:
                readers = [u for u in node.users if u.op != "output" and not self._is_in_region(u)]
                left += [reader for reader in readers if reader not in seen]
                seen.update(readers)
        return False


def _is_quantized(fused: FusedConvolution) -> bool:
    """Whether a kernel may compute a convolution, which reads channels-last pixels in place."""
    weight = fused.weight_params
    return fused.x_params is not None or (
        weight is not None and not weight.spec.dtype.is_floating_point
    )


def _is_pure(node: Node) -> bool:
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


def _become_channels_last(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> bool:
    """Whether the images among the results of an op become channels-last, and nothing else changes.

    The other results are such as the statistics of a batch norm.
    """
    if len(before) != len(after) or not any(map(_is_channels_last, after)):
        return False
    return all(
        same_shape(old.shape, new.shape) and (_is_channels_last(new) or same_strides(old, new))
        for old, new in zip(before, after, strict=True)
    )


def _is_channels_last(value: torch.Tensor) -> bool:
    return has_fastest_channels(value) and not is_row_major(value)


def _is_either(value: torch.Tensor) -> bool:
    """Whether the pixels need no copy: channels are adjacent, or there is a single pixel."""
    if not has_fastest_channels(value):
        return False
    one_channel = same_size(value.shape[1], 1)
    return not one_channel or all(same_size(size, 1) for size in value.shape[2:])


def _channels_last(value: torch.Tensor) -> torch.Tensor:
    memory_format = channels_last_of(value.dim())
    assert memory_format is not None, "only such values enter"
    with torch.no_grad():
        return value.clone(memory_format=memory_format)
