"""Sink a split below isomorphic ops on its parts, which become one op on the whole."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice, pairwise
from typing import Any, ClassVar

import torch
from torch.fx.node import map_arg

from qfuse.cost.model import CostModel
from qfuse.cost.work import WorkRange
from qfuse.ir.dtypes import FLOATS
from qfuse.ir.graph.alias import leaves_graph
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.movement.registry import SPLITS, movement_of
from qfuse.ir.movement.slice import Slice
from qfuse.ir.ops.convolution import as_convolution
from qfuse.ir.ops.linear import as_linear
from qfuse.ir.ops.product import as_fused_product
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import tensor_of
from qfuse.ir.sizes import Size, same_size, same_strides
from qfuse.optimize.match.strides import restride, stride_sensitive_user
from qfuse.optimize.splits.isomorphic_ops import IsomorphicOps, widen
from qfuse.optimize.splits.split_work import (
    is_narrower,
    is_read_from_memory,
    pass_of_result,
    round_trip,
)
from qfuse.patterns.activations import ACTIVATION_OPS
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule, aten

# A bound on the search: of more parts, only the run of all of them is tried.
_MOST_PARTS = 8
_MOST_LANES = 64
_MOST_USERS = 64


@dataclass(frozen=True, slots=True)
class SinkSplitSite:
    """Parts of a tensor, and the isomorphic ops on all of them.

    Attributes:
        node: The split.
        source: Its operand.
        parts: The parts, which are adjacent.
        lanes: The isomorphic ops, in order.
        exits: The lanes with other users.
        absorbed: Whether a quantized linear computes the whole and takes all lanes as its epilogue.
    """

    node: Node
    source: Node
    parts: tuple[Slice, ...]
    lanes: tuple[IsomorphicOps, ...]
    exits: tuple[IsomorphicOps, ...]
    absorbed: bool


class SinkSplit(Rule[SinkSplitSite]):
    """``f(split(x)[0])``, ``f(split(x)[1])`` become ``split(f(x))``, for any isomorphic ops ``f``.

    Before::

                   .-- view -- permute -- rotary -- attention
        x -> split +-- view -- permute -- rotary -- attention
                   '-- view -- permute -- attention

    After::

        x -> slice -> view -> permute -> rotary -> split -- attention
                                                        '-- attention
        x -> split '-- view -- permute -- attention

    Any number of views, casts, pointwise ops, joins along other axes and quantizes is crossed at
    once, for the longest run of adjacent parts with isomorphic ops.

    Refuses: parts of unknown size; an operand that differs between parts, or varies along the
    parts; a result that leaves the graph, whose memory would be shared; a result with a
    stride-sensitive user. Does not pay where the users are fused with the ops on the parts.
    """

    name = "sink-split"
    anchors: ClassVar[tuple[OpOverload, ...]] = SPLITS
    exactness = Exactness.EXACT
    # Vectorized kernels use another formula for the tail of a row, and the tails move.
    proof = Exactness.ROUNDING

    def match(self, node: Node) -> SinkSplitSite | Miss:
        """Match a split with adjacent parts and isomorphic ops on them."""
        items = sorted(_items(node).items())
        if len(items) < 2:  # noqa: PLR2004
            return Miss(MissCode.PATTERN, node, "only one of its parts has users", progress=0)
        found = [movement_of(part) for _, part in items]
        parts = [part for part in found if isinstance(part, Slice)]
        if len(parts) < len(found):
            return Miss(MissCode.SHAPE, node, "a part of unknown size")
        closest = Miss(
            MissCode.PATTERN, node, "there are no isomorphic ops on its parts", progress=0
        )
        # Longest first: rotary positions are those of queries and keys, but not of values.
        for run in _runs(parts):
            site = _match_run(node, run)
            if isinstance(site, SinkSplitSite):
                return site
            closest = max(closest, site, key=lambda miss: miss.progress)
        return closest

    def gain(self, site: SinkSplitSite, cost: CostModel) -> float | None:
        """Compare storing one result per part with storing one for all parts."""
        before: list[WorkRange] = []
        after: list[WorkRange] = []
        inside = _members(site.lanes)
        for lanes in site.exits:
            # A value that its users compute on the fly is
            # not stored now, so it costs nothing to save.
            stored = [n for n in lanes.nodes if is_read_from_memory(n, inside)]
            before += [pass_of_result(site.source, tensor_of(n)) for n in stored]
            if stored:
                after.append(pass_of_result(site.source, lanes.value, absorbed=site.absorbed))
        if not before:
            # Everything is computed where it is used: another value in memory only adds a pass,
            # and a narrower one in place of the product's saves a part of one.
            if not site.absorbed or not is_narrower(site.lanes[-1].value, site.source):
                return -math.inf
            before = [round_trip(tensor_of(site.source))]
            after = [round_trip(site.lanes[-1].value)]
        compared = cost.compare(before, after)
        if compared.loses_nowhere:
            return compared.gain
        pairs = zip(compared.before.values, compared.after.values, strict=True)
        return min(old - new for old, new in pairs)

    def rewrite(self, site: SinkSplitSite, rw: Rewriter) -> None:
        """Compute the wide values, then split those that have users."""
        wide = {site.lanes[0].first: _run_of(site, rw)}
        for lanes in site.lanes[1:]:
            assert lanes.call is not None, "only the split tensor is not computed"
            args, kwargs = map_arg((lanes.call.args, lanes.call.kwargs), lambda n: wide.get(n, n))
            # Before the first part, whose users may come before the other parts.
            with rw.before(min(lanes.nodes)):
                wide[lanes.first] = rw.call(lanes.call.op, *args, **kwargs)
        # From the last to the first, so that a node that is replaced later is not viewed again.
        for lanes in reversed(site.exits):
            with rw.before(min(lanes.nodes)):
                op = aten.split_with_sizes.default
                pieces = rw.call(op, wide[lanes.first], lanes.sizes, lanes.axis)
                items = [rw.item(pieces, index) for index in range(len(lanes.nodes))]
            for old, new in zip(lanes.nodes, items, strict=True):
                restride(old, new, rw)
        _split_again(site.node, rw)


def _split_again(split: Node, rw: Rewriter) -> None:
    """Split again for the remaining users of a part, so that other isomorphic ops are found."""
    assert isinstance(split.target, OpOverload), "the anchor is a call of an op"
    again = rw.replay(split.target, split.args, dict(split.kwargs), split.meta["val"])
    for item in list(split.users):
        rw.replace(item, rw.item(again, int(str(item.args[1]))))


def _items(split: Node) -> dict[int, Node]:
    """Return the parts that have users, by index."""
    items: dict[int, Node] = {}
    for user in split.users:
        assert user.target is operator.getitem, "a part of a split is an item of it"
        if user.users:
            items.setdefault(int(str(user.args[1])), user)
    return items


def _runs(parts: Sequence[Slice]) -> list[tuple[Slice, ...]]:
    """Return the runs of neighbours, from the longest to the shortest; of many parts, all."""
    runs = []
    least = 1 if len(parts) <= _MOST_PARTS else len(parts) - 1
    for count in range(len(parts), least, -1):
        for start in range(len(parts) - count + 1):
            run = tuple(parts[start : start + count])
            if all(a.end == b.start for a, b in pairwise(run)):
                runs.append(run)
    return runs


def _match_run(node: Node, parts: tuple[Slice, ...]) -> SinkSplitSite | Miss:
    first = parts[0]
    source = tensor_of(first.source)
    start, end = first.start, parts[-1].end
    assert start is not None, "a part has bounds"
    assert end is not None, "a part has bounds"
    whole = source.narrow(first.axis, start, end - start)
    root = IsomorphicOps(tuple(part.node for part in parts), first.axis, whole)
    lanes, closest = _grow(root)
    inside = _members(lanes)
    # Lanes of views only are no results: users can view the parts as well.
    exits = tuple(
        each for each in lanes if each.computes and any(_left(n, inside) for n in each.nodes)
    )
    if not exits:
        text = "no isomorphic ops compute anything on its parts"
        return closest or Miss(MissCode.PATTERN, first.node, text, progress=0)
    # An epilogue applies to all columns of a product, so a run of some parts is not absorbed.
    absorbed = end - start == source.shape[first.axis] and _is_epilogue(first.source, lanes)
    return SinkSplitSite(node, first.source, parts, tuple(lanes), exits, absorbed)


def _members(lanes: Sequence[IsomorphicOps]) -> frozenset[Node]:
    return frozenset(node for each in lanes for node in each.nodes)


def _left(node: Node, inside: frozenset[Node]) -> bool:
    """Whether a value has other users, or no users at all."""
    return not node.users or any(user not in inside for user in node.users)


def _grow(root: IsomorphicOps) -> tuple[list[IsomorphicOps], Miss | None]:
    """Find the isomorphic ops on all parts, from the first op to the last."""
    lanes, closest = [root], None
    of = dict.fromkeys(root.nodes, root)
    # In the order of the graph, so that all operands of an op come before it.
    queue = list(islice(root.first.users, _MOST_USERS))
    heapify(queue)
    seen = set(queue)
    while queue and len(lanes) < _MOST_LANES:
        found = _alike(heappop(queue), of)
        if isinstance(found, IsomorphicOps):
            lanes.append(found)
            of.update(dict.fromkeys(found.nodes, found))
            for user in islice(found.first.users, _MOST_USERS):
                if user not in seen:
                    seen.add(user)
                    heappush(queue, user)
        elif found is not None:
            closest = found
    return lanes, closest


def _alike(node: Node, of: Mapping[Node, IsomorphicOps]) -> IsomorphicOps | Miss | None:
    """Return the calls on all parts that are isomorphic to one on the first part."""
    own = [n for n in node.all_input_nodes if n in of]
    if not isinstance(node.meta.get("val"), torch.Tensor) or any(of[n].first is not n for n in own):
        return None
    nodes = [node]
    for index in range(1, len(of[own[0]].nodes)):
        peer = next((u for u in _users(own[0], index, of) if _same(node, u, index, of)), None)
        if peer is None:
            return None
        nodes.append(peer)
    lanes = widen(nodes, of)
    if lanes is None:
        text = "{} is done on every part, and is another op on the whole"
        return Miss(MissCode.AXIS, node, text, op_name(node), progress=2)
    late = [n for n in node.all_input_nodes if n not in of and any(peer < n for peer in nodes)]
    if late:
        text = "{} is computed after a part that the whole must come before"
        return Miss(MissCode.ORDER, late[0], text, late[0].name, progress=3)
    # Views of the parts stay for other users; computed values are replaced.
    return (_refuse(lanes) if lanes.computes else None) or lanes


def _users(node: Node, index: int, of: Mapping[Node, IsomorphicOps]) -> list[Node]:
    """Return the users of another part in the place of ``node``."""
    return [u for u in islice(of[node].nodes[index].users, _MOST_USERS) if u not in of]


def _same(a: Node, b: Node, index: int, of: Mapping[Node, IsomorphicOps]) -> bool:
    """Whether a call on the first part and one on another part differ only in the parts."""
    if a.target is not b.target or not isinstance(b.meta.get("val"), torch.Tensor):
        return False
    if is_call(a, *_SHAPED):
        # The meaning of the sizes for the whole is checked later.
        return of[a.all_input_nodes[0]].nodes[index] is b.all_input_nodes[0]
    return _equal((a.args, dict(a.kwargs)), (b.args, dict(b.kwargs)), index, of)


_SHAPED = (
    *(aten.view.default, aten.reshape.default, aten._unsafe_view.default),
    aten.expand.default,
)


def _equal(a: Any, b: Any, index: int, of: Mapping[Node, IsomorphicOps]) -> bool:
    if isinstance(a, Node):
        return bool((of[a].nodes[index] if a in of else a) is b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y, index, of) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k], index, of) for k in a)
    # 1 and True are equal in Python, and are not the same argument.
    return type(a) is type(b) and repr(a) == repr(b)


def _refuse(lanes: IsomorphicOps) -> Miss | None:
    """Refuse to replace separate values by parts of one wide value."""
    for index, node in enumerate(lanes.nodes):
        if leaves_graph(node):
            text = "{} leaves the graph, and would share its memory with others"
            return Miss(MissCode.SHARED, node, text, op_name(node), progress=3)
        rigid = stride_sensitive_user(node)
        if rigid is not None:
            text = "{} depends on its strides, which change for a part of a wider result"
            return Miss(MissCode.ORDER, rigid, text, op_name(rigid), progress=3)
        if not _lies_alike(lanes, index):
            text = "the memory order of its axes would change"
            return Miss(MissCode.SHAPE, node, text, progress=3)
    return None


def _lies_alike(lanes: IsomorphicOps, index: int) -> bool:
    """Whether the values computed from a part get the strides that they had.

    An elementwise op orders the axes of its result by the strides of its operands.
    """
    old = tensor_of(lanes.nodes[index])
    order = _order(old.shape, old.stride())
    if order is not None and order == _order(old.shape, lanes.value.stride()):
        return True
    with torch.no_grad():
        return same_strides(torch.empty_like(lanes.part(index)), torch.empty_like(old))


def _order(shape: Sequence[Size], strides: Sequence[Size]) -> list[int] | None:
    """Return the axes from the largest stride to the smallest, if that order is unique."""
    long = [axis for axis, size in enumerate(shape) if not same_size(size, 1)]
    steps = [step for axis in long if isinstance(step := strides[axis], int) and step]
    if len(set(steps)) < len(long):
        return None
    return sorted(long, key=lambda axis: -int(strides[axis]))


def _is_epilogue(source: Node, lanes: Sequence[IsomorphicOps]) -> bool:
    """Whether a quantized product computes ``source`` for these lanes only and can fuse them all.

    A product is a linear or a convolution.
    """
    product = as_linear(source) or as_convolution(source)
    quantized = product is not None and as_dequantize(product.weight) is not None
    if not quantized and as_fused_product(source) is None:
        return False
    steps = (*ACTIVATION_OPS, aten._to_copy.default)
    # A lane between them with other users would be needed in memory, besides the last result.
    chain = all(len(node.users) == 1 for each in lanes[:-1] for node in each.nodes)
    fused = (is_call(each.first, *steps) and each.value.dtype in FLOATS for each in lanes[1:])
    return len(source.users) == 1 and chain and all(fused)


def _run_of(site: SinkSplitSite, rw: Rewriter) -> Node:
    """Return the tensor if ``parts`` are all of its parts, or else a slice of it."""
    first, last = site.parts[0], site.parts[-1]
    if last.end == tensor_of(site.source).shape[first.axis] and first.start == 0:
        return site.source
    return rw.call(aten.slice.Tensor, site.source, first.axis, first.start, last.end)
