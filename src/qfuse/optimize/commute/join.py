"""``cat`` and ``stack``: every operand is a slice of the result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import constant_of, op_name
from qfuse.ir.movement.base import Moved, Mover, TensorMover, move_levels
from qfuse.ir.movement.slice import Select, Slice
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import Dequantize, Quantize
from qfuse.ir.ops.views import QuantParams, dtype_of, node_of, shape_of, tensor_of
from qfuse.ir.quant.block import covers
from qfuse.ir.quant.spec import Block, QuantSpec, ZeroPointDomain
from qfuse.ir.refusal import Refusal
from qfuse.optimize.commute.base import (
    Commutes,
    Crossing,
    End,
    Work,
    lifted_work,
    moved,
    vanishes,
)
from qfuse.optimize.match.move_qparams import GraphMover
from qfuse.rewrite.prelude import Miss, MissCode, Node, OpOverload, Rewriter, arguments, aten

JOINS: tuple[OpOverload, ...] = (aten.cat.default, aten.stack.default)


@dataclass(frozen=True, slots=True)
class CommutingJoin(Commutes):
    """Tensors of one dtype and rank, put together along an axis.

    ``quantize(cat([a, b]), s)`` is ``cat([quantize(a, s_a), quantize(b, s_b)])``: every part gets
    its own slice of the parameters. Refuses: a block that spans two parts; unknown sizes along the
    axis, if blocks follow it. Does not pay where the float result is needed as well.

    ``cat([dequantize(a, s_a), dequantize(b, s_b)])`` is ``dequantize(cat([a, b]), s)``. The parts
    have equal parameters, or one scale per index of the axis, which are joined like the values.
    The new range covers all ranges; dequantize ignores it. Refuses: parts with other
    storage, arithmetic or blocks; different scales that are not per index of the axis.

    Attributes:
        node: The op.
        parts: Its operands; a tensor may occur twice.
        axis: The axis of the result.
    """

    ops: ClassVar[tuple[OpOverload, ...]] = JOINS

    node: Node
    parts: tuple[Node, ...]
    axis: int

    @classmethod
    def of(cls, node: Node) -> CommutingJoin | Miss | None:
        """View a join; miss one that promotes or skips one of its parts."""
        if not is_call(node, *JOINS):
            return None
        text = "{} joins tensors of several dtypes or ranks"
        return as_join(node) or Miss(MissCode.DTYPE, node, text, op_name(node), progress=2)

    @property
    def sources(self) -> tuple[Node, ...]:
        """The parts."""
        return self.parts

    @property
    def is_stack(self) -> bool:
        """Whether the axis is new, as in ``stack``."""
        return is_call(self.node, aten.stack.default)

    def apply(self, mover: Mover, values: Sequence[Any]) -> Any:
        """Join other values of the shapes of the parts."""
        op = aten.stack.default if self.is_stack else aten.cat.default
        return mover.call(op, list(values), self.axis)

    def pieces(self) -> tuple[Slice | Select, ...]:
        """Return every part as a movement of the result."""
        if self.is_stack:
            picks = enumerate(self.parts)
            return tuple(Select(part, self.node, self.axis, index) for index, part in picks)
        pieces = []
        start: int | None = 0
        for part in self.parts:
            size = shape_of(part)[self.axis]
            known = start is not None and isinstance(size, int)
            # After a part of unknown size, the offsets of all later parts are unknown too.
            end = start + size if start is not None and isinstance(size, int) else None
            first = start if known else None
            pieces.append(Slice(part, self.node, self.axis, first, end, 1, (first, end)))
            start = end
        return tuple(pieces)

    def lift(self, quantize: Quantize) -> Crossing | Miss:
        """Move the parameters to every part."""
        spec = quantize.params.spec
        blocks = (spec.block, *(() if spec.outer is None else (spec.outer,)))
        # With one block along the axis, parts of unknown size have that block too.
        whole = all(covers(b[self.axis], shape_of(self.node)[self.axis]) for b in blocks)
        ends: list[End] = []
        for piece in self.pieces():
            if isinstance(piece, Slice) and None in piece.bounds and not whole:
                step: Moved | Refusal = Refusal(f"the sizes along axis {self.axis} are not known")
            else:
                step = move_levels(piece.forward, spec.block, spec.outer)
            if isinstance(step, Refusal):
                text = "{} parameters in blocks of {} cannot be split above {}: {}"
                blocks_of = spec.granularity(shape_of(quantize.x)), spec.block_text()
                details = *blocks_of, op_name(self.node), step.reason
                return Miss(MissCode.GRANULARITY, self.node, text, *details, progress=2)
            ends.append(moved(piece.node, quantize.params, [step]))
        return Crossing(tuple(ends), self._apply, lambda: self._lifted_work(quantize))

    def sink(self, operands: tuple[Dequantize, ...]) -> Crossing | Miss:
        """Join the quantized values and, if they differ, the parameters."""
        spec = _united(operands)
        if isinstance(spec, Miss):
            return spec
        joined = _JoinedParams(self, tuple(part.params for part in operands), spec)
        return joined.refuse(operands) or Crossing((End(self.node, joined.make),), self._apply)

    def shares_with(self, user: Node) -> bool:
        """Any user may stay if no dequantize remains below."""
        del user
        return vanishes(self.node)

    def _apply(self, mover: Mover, values: Sequence[Any]) -> Iterable[Any]:
        return [self.apply(mover, values)]

    def _lifted_work(self, quantize: Quantize) -> Work:
        goes = all(is_call(user, ops.quantize) for user in self.node.users)
        return lifted_work(self.node, quantize.params.spec, [self.node], self.parts, goes=goes)


def as_join(value: object) -> CommutingJoin | None:
    """View ``value`` as a join; ``None`` if it is another op, or promotes or skips a part."""
    if not isinstance(value, Node) or not is_call(value, *JOINS):
        return None
    a = arguments(value)
    tensors = a["tensors"]
    assert isinstance(tensors, (list, tuple)), f"not a list of tensors: {value.format_node()}"
    parts = tuple(map(node_of, tensors))
    axis = a["dim"]
    rank = len(shape_of(value))
    stacked = is_call(value, aten.stack.default)
    # cat skips a tensor of shape [0], whatever the shape of the others is.
    alike = all(
        dtype_of(part) == dtype_of(value) and len(shape_of(part)) + stacked == rank
        for part in parts
    )
    if not alike or not isinstance(axis, int):
        return None
    return CommutingJoin(value, parts, axis % rank)


def _united(parts: Sequence[Dequantize]) -> QuantSpec | Miss:
    """Return the spec of the parts with their united range, if they differ only in the range."""
    first = parts[0].params.spec
    for part in parts:
        if part.params.spec.dtype != first.dtype:
            text = "the parts are stored in different dtypes: {} and {}"
            return Miss(MissCode.DTYPE, part.node, text, first, part.params.spec, progress=3)
    low = min(part.params.spec.quant_min for part in parts)
    high = max(part.params.spec.quant_max for part in parts)
    united = replace(first, quant_min=low, quant_max=high)
    for part in parts:
        spec = part.params.spec
        # Dequantize reads the range only to find its middle, from which a float offset counts.
        ranged = spec.domain is ZeroPointDomain.FLOAT_OFFSET
        if replace(spec, quant_min=low, quant_max=high) != united or (ranged and spec != united):
            text = "the parts are quantized in different ways: {} and {}"
            return Miss(MissCode.GRANULARITY, part.node, text, first, spec, progress=3)
    return united


@dataclass(frozen=True, slots=True)
class _JoinedParams:
    """The parameters of a joined tensor.

    Attributes:
        join: The join.
        params: The parameters of the parts.
        spec: The spec with the united range; its block is still that of the parts.
    """

    join: CommutingJoin
    params: tuple[QuantParams, ...]
    spec: QuantSpec

    @property
    def same(self) -> bool:
        """Whether all parts have one scale along the axis, and the scales are equal."""
        first = self.params[0]
        # The ranges may differ, which `_united` has allowed; scales and zero points may not.
        same = all(replace(own, spec=first.spec).same_as(first) for own in self.params)
        return same and (self.join.is_stack or self._one_block(self.spec.block))

    @property
    def same_outer(self) -> bool:
        """Whether one second level of scales, independent of the axis, applies to all parts."""
        first, outer = self.params[0], self.spec.outer
        own = [replace(p, scale=first.scale, zero_point=first.zero_point) for p in self.params]
        same = all(replace(p, spec=first.spec).same_as(first) for p in own)
        return same and outer is not None and self._one_block(outer)

    def refuse(self, parts: Sequence[Dequantize]) -> Miss | None:
        """Refuse parameters that cannot be joined."""
        same, stack = self.same, self.join.is_stack
        if same and not stack:
            return None
        axis = self.join.axis
        # One scale per part is a regular grid only if the
        # parts have one length; one per index always is.
        if not stack and self.spec.block[axis] != 1:
            text = "the parts have different scales, and not one per index of axis {}"
            return Miss(MissCode.GRANULARITY, self.join.node, text, axis, progress=3)
        wrong = None if same else self._refuse_types(parts)
        outer = self.spec.outer
        if wrong or stack or outer is None or outer[axis] == 1 or self.same_outer:
            return wrong
        text = "the parts have different second levels of scales, and not one per index of axis {}"
        return Miss(MissCode.GRANULARITY, self.join.node, text, axis, progress=3)

    def make(self, rw: Rewriter) -> QuantParams:
        """Join scales, zero points and second levels of scales, where they differ."""
        same, stack = self.same, self.join.is_stack
        keeps = same and not stack
        keeps_outer = not stack and (same or self.same_outer)
        outer = self.spec.outer
        if outer is not None:
            outer = self._block(outer, same=same or keeps_outer)
        used = self.params[:1] if same else self.params

        def joined(nodes: Sequence[Node | None], *, keep: bool) -> Node | None:
            known = [node for node in nodes if node is not None]
            if not known:
                return None
            # Of equal parameters one tensor is left: stacked alone, it gets the new axis of size 1.
            return known[0] if keep else _join_nodes(self.join, known, rw)

        scale = joined([p.scale for p in used], keep=keeps)
        assert scale is not None, "every part has a scale"
        zero = joined([p.zero_point for p in used], keep=keeps)
        second = joined([p.outer_scale for p in used], keep=keeps_outer)
        spec = self.spec.with_block(self._block(self.spec.block, same=same), outer)
        return QuantParams(spec, scale, zero, second)

    def _one_block(self, block: Block) -> bool:
        axis = self.join.axis
        return all(covers(block[axis], shape_of(part)[axis]) for part in self.join.parts)

    def _refuse_types(self, parts: Sequence[Dequantize]) -> Miss | None:
        """Refuse parameters with different dtypes, or that only some parts have."""
        first = self.params[0]
        for part in parts:
            own = part.params
            pairs = (
                (first.scale, own.scale),
                (first.zero_point, own.zero_point),
                (first.outer_scale, own.outer_scale),
            )
            for a, b in pairs:
                if (a is None) != (b is None):
                    text = "one part has zero points, another does not"
                    return Miss(MissCode.ZERO_POINT, part.node, text, progress=3)
                if a is not None and b is not None and tensor_of(a).dtype != tensor_of(b).dtype:
                    text = "the parts have parameters of different dtypes"
                    return Miss(MissCode.DTYPE, b, text, progress=3)
        return None

    def _block(self, block: Block, *, same: bool) -> Block:
        """Return the block of the joined tensor."""
        made = list(block)
        if self.join.is_stack:
            made.insert(self.join.axis, None if same else 1)
        elif same:
            made[self.join.axis] = None
        return tuple(made)


def _join_nodes(join: CommutingJoin, nodes: list[Node], rw: Rewriter) -> Node:
    mover = GraphMover(rw)
    values = [value for value in map(constant_of, nodes) if value is not None]
    # Known scales are joined now; in the graph they would be joined in every call.
    if len(values) == len(nodes):
        return mover.node(join.apply(TensorMover(), values), str(nodes[0].target))
    return mover.node(join.apply(mover, nodes), "joined")
