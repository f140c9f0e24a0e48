"""Quantize first, then move: the stored numbers are smaller, and quantizing meets its producer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import torch

from qfuse.cost.model import CostModel
from qfuse.cost.work import WorkRange
from qfuse.ir.graph.alias import leaves_graph
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import constant_of, op_name
from qfuse.ir.movement.base import Movement
from qfuse.ir.movement.gather import Gather, Index
from qfuse.ir.movement.registry import movement_of
from qfuse.ir.movement.slice import Select, Slice
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import Quantize, as_quantize
from qfuse.ir.ops.view_ops import RESHAPES
from qfuse.ir.ops.views import QuantParams, bits_equal, node_of, shape_of, tensor_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.optimize.match.memory_cost import passed, saved
from qfuse.optimize.match.move_qparams import (
    FakeMover,
    GraphMover,
    PropagatedUp,
    copies,
    is_free,
    moved_params,
    movement_name,
    moves_stored,
    propagate_up,
    reads_any_strides,
    refuse_uncovered,
    same_strides,
)
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    arguments,
)

_PICKS = (Slice, Select, Index, Gather)
# Parts of one tensor that are quantized alike are priced together; more of them do not tell more.
_PARTS = 64


@dataclass(frozen=True, slots=True)
class LiftQuantizeSite:
    """A quantize, and the movements that it crosses."""

    quantize: Quantize
    propagate_up: PropagatedUp


class LiftQuantize(Rule[LiftQuantizeSite]):
    """``quantize(m(x), s)`` becomes ``m(quantize(x, s'))`` for every movement ``m``.

    Before::

        x -> view -> quantize(s) -> ...

    After::

        x -> quantize(s viewed back) -> view -> ...

    A whole chain of views and copies is crossed at once. What is crossed stays as it is for its
    other readers. The scale is given: how it came about does not matter.

    Refuses: parameters that are not constant on blocks above the movement; stored numbers that
    leave the graph, whose memory would be shown by a view; a reader that may depend on strides
    where they change. Does not pay where much more than what is picked would be quantized.
    """

    name = "lift-quantize"
    anchors: ClassVar[tuple[OpOverload, ...]] = (ops.quantize,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> LiftQuantizeSite | Miss:
        """Match a quantize of a movement that its parameters cross."""
        quantize = as_quantize(node)
        assert quantize is not None, "the anchor is a quantize"
        first = movement_of(quantize.x)
        if first is None:
            return refuse_uncovered(quantize.x) or Miss(
                MissCode.PATTERN, node, "it does not quantize a movement", progress=0
            )
        stored = quantize.params.spec.dtype
        if not moves_stored(first, stored):
            text = "{} does not move {}"
            told = movement_name(first), dtype_name(stored)
            return Miss(MissCode.DTYPE, first.node, text, *told, progress=2)

        def crosses(movement: Movement) -> bool:
            if movement.node is first.node:
                return True
            return is_free(first) and is_free(movement) and moves_stored(movement, stored)

        spec = quantize.params.spec
        found = propagate_up(quantize.x, spec.block, crosses, spec.outer)
        if not found.steps:
            return _refuse_block(quantize, found)
        moved = found.apply(FakeMover(), _stored(found.source, quantize))
        return refuse_layout(node, moved) or LiftQuantizeSite(quantize, found)

    def gain(self, site: LiftQuantizeSite, cost: CostModel) -> float | None:
        """Compare what is quantized, and what is copied, before and after."""
        movement = site.propagate_up.steps[0].movement
        if is_free(movement):
            return None
        real, stored = site.quantize.params.spec.real, site.quantize.params.spec.dtype
        before = [passed(q.x, real, stored) for q in _parts(site, movement)]
        after: list[WorkRange] = []
        if not _quantized_already(site):
            after.append(passed(site.propagate_up.source, real, stored))
        if copies(movement):
            after.append(passed(movement.node, stored, stored))
            if all(is_call(user, ops.quantize) for user in movement.node.users):
                before.append(passed(movement.node, real, real))
        return saved(cost, before, after)

    def rewrite(self, site: LiftQuantizeSite, rw: Rewriter) -> None:
        """Quantize the source and move that."""
        steps = [step.moved for step in site.propagate_up.steps]
        params = moved_params(rw, site.quantize.params, steps)
        q = rw.call(ops.quantize, *params.call_args(site.propagate_up.source))
        rw.replace(site.quantize.node, site.propagate_up.apply(GraphMover(rw), q))


def refuse_layout(node: Node, moved: torch.Tensor, *, moves: bool = True) -> Miss | None:
    """Refuse to give the readers of ``node`` a value with the strides of ``moved`` instead.

    Args:
        node: Stored numbers.
        moved: What stands for them afterwards.
        moves: Whether that may be a view of something else.
    """
    if leaves_graph(node) and (moves or not same_strides(moved, tensor_of(node))):
        text = "its stored numbers leave the graph, as a tensor of their own"
        return Miss(MissCode.SHARED, node, text, progress=3)
    old = tensor_of(node)
    if same_strides(moved, old):
        return None
    # A quantized op reads any strides, and what it gives depends on their order alone.
    alike = same_strides(torch.empty_like(moved), torch.empty_like(old))
    if alike and reads_any_strides(node):
        return None
    text = "its strides would change, and {} may depend on them"
    return Miss(MissCode.SHAPE, node, text, ", ".join(map(op_name, node.users)), progress=3)


def _refuse_block(quantize: Quantize, found: PropagatedUp) -> Miss:
    assert found.stuck is not None, "the first movement was not crossed"
    movement, stuck = found.stuck
    return Miss(
        MissCode.GRANULARITY,
        movement.node,
        "{} parameters in blocks of {} do not move above {}: {}",
        quantize.params.spec.granularity(shape_of(quantize.x)),
        quantize.params.spec.block_text(),
        movement_name(movement),
        stuck.reason,
        progress=2,
    )


def _stored(x: Node, quantize: Quantize) -> torch.Tensor:
    with torch.no_grad():
        return torch.empty_like(tensor_of(x), dtype=quantize.params.spec.dtype)


def _parts(site: LiftQuantizeSite, movement: Movement) -> Iterator[Quantize]:
    """Give the quantizes, with the same parameters, of this part and the others of its source."""
    yield site.quantize
    if not isinstance(movement, _PICKS):
        return
    for reader in islice(_users(site.propagate_up.source), _PARTS):
        part = movement_of(reader)
        if not isinstance(part, _PICKS) or reader is movement.node:
            continue
        for user in islice(reader.users, _PARTS):
            other = as_quantize(user)
            if other is not None and other.params.same_as(site.quantize.params):
                yield other
                break


def _users(x: Node) -> Iterator[Node]:
    """Give the readers of ``x``; of a split, its parts."""
    for user in x.users:
        parts = isinstance(user.meta.get("val"), (list, tuple))
        yield from user.users if parts else (user,)


def _quantized_already(site: LiftQuantizeSite) -> bool:
    """Whether the source is quantized with these parameters for another part of it."""
    params = site.quantize.params
    last = site.propagate_up.steps[-1].moved
    spec = params.spec.with_block(last.block, None if last.outer is None else last.outer.block)
    for user in islice(site.propagate_up.source.users, _PARTS):
        other = as_quantize(user)
        if other is None or other.x is not site.propagate_up.source or other.params.spec != spec:
            continue
        pairs = zip(_parameters(other.params), _parameters(params), strict=True)
        if all(_same_numbers(a, b) for a, b in pairs):
            return True
    return False


def _parameters(params: QuantParams) -> tuple[Node | None, ...]:
    return params.scale, params.zero_point, params.outer_scale


def _same_numbers(a: Node | None, b: Node | None) -> bool:
    """Whether two scales or zero points are the same numbers, whatever shape they are seen in."""
    if a is None or b is None:
        return a is b
    first, second = _unviewed(a), _unviewed(b)
    if first is second:
        return True
    left, right = constant_of(first), constant_of(second)
    if left is None or right is None or left.dtype != right.dtype:
        return False
    return left.numel() == right.numel() and bits_equal(left, right)


def _unviewed(node: Node) -> Node:
    while is_call(node, *RESHAPES):
        node = node_of(arguments(node)["self"])
    return node
