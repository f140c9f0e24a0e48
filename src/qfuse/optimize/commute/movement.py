"""Movements: parameters follow the elements, by the algebra of :mod:`qfuse.ir.movement`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from qfuse.cost.work import WorkRange
from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.graph.stage_graph import constant_of, op_name
from qfuse.ir.movement.base import Moved, Movement, move_levels
from qfuse.ir.movement.collective import Collective, is_waited_for
from qfuse.ir.movement.gather import Gather, Index
from qfuse.ir.movement.registry import MOVEMENT_OPS, SPLITS, movement_of
from qfuse.ir.movement.slice import Select, Slice
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import Dequantize, Quantize, as_quantize
from qfuse.ir.ops.view_ops import RESHAPES
from qfuse.ir.ops.views import QuantParams, bits_equal, node_of, shape_of
from qfuse.ir.quant.spec import QuantSpec, dtype_name
from qfuse.ir.refusal import Refusal
from qfuse.optimize.commute.base import (
    USERS,
    Commutes,
    Crossing,
    Work,
    feeds_product,
    lifted_work,
    moved,
    vanishes,
)
from qfuse.optimize.match.memory_cost import passed
from qfuse.optimize.match.move_qparams import (
    PropagatedUp,
    copies,
    is_free,
    movement_name,
    moves_stored,
    propagate_up,
)
from qfuse.rewrite.prelude import Miss, MissCode, Node, OpOverload, arguments, aten

# Movements that show a part of their source: other parts of it are priced together with them.
_PICKS = (Slice, Select, Index, Gather)

# A chain with a quantize on each rung would be repeated for each of them, which takes quadratic
# time and memory; no model has a longer chain without reason.
_MOST_MOVEMENTS = 32


@dataclass(frozen=True, slots=True)
class MovementOp(Commutes):
    """An op that moves elements and computes nothing.

    ``quantize(m(x), s)`` is ``m(quantize(x, s'))``. A chain of views and copies is crossed in one
    step; the float chain stays for its other users. Any scale is accepted, static or dynamic.
    Refuses: parameters that are not constant on blocks above the movement. Does not pay where many
    more elements would be quantized than are selected.

    ``m(dequantize(q, s))`` is ``dequantize(m(q), s')``. Refuses: parameters that are not constant
    on blocks below the movement; a dequantize with other users, since it would be computed twice,
    unless a product, or all users of the moved one, would use quantized values. Does not pay where
    copies of one element would each be dequantized.

    Attributes:
        node: The op.
        source: Its operand.
        movement: Its effect on parameters.
    """

    # `as_strided` depends on memory and is never crossed; listed, it is an anchor that says so.
    ops: ClassVar[tuple[OpOverload, ...]] = (*MOVEMENT_OPS, aten.as_strided.default)
    folds: ClassVar[bool] = True

    node: Node
    source: Node
    movement: Movement

    @classmethod
    def of(cls, node: Node) -> MovementOp | Miss | None:
        """View a movement; miss an op that moves elements in an unsupported way."""
        movement = movement_of(node)
        if movement is not None:
            return cls(node, movement.source, movement)
        op = overload_of(node)
        if op is None or not (op.is_view or op in MOVEMENT_OPS):
            return None
        text = "it is not supported how {} moves parameters, with these arguments"
        return Miss(MissCode.ARGUMENT, node, text, op_name(node))

    @property
    def across_ranks(self) -> bool:
        """Whether it is a collective."""
        return isinstance(self.movement, Collective)

    def lift(self, quantize: Quantize) -> Crossing | Miss:
        """Quantize the source of the chain of movements."""
        first, spec = self.movement, quantize.params.spec
        if not moves_stored(first, spec.dtype):
            return _refuse_dtype(first, spec)
        if _is_long(first):
            text = "there are more than {} movements above it, which would be repeated for it"
            return Miss(MissCode.PROFIT, quantize.node, text, _MOST_MOVEMENTS)

        def crosses(movement: Movement) -> bool:
            # The first movement may cost something, which `gain` decides; the rest of the chain is
            # crossed only where that is free.
            if movement.node is first.node:
                return True
            return is_free(first) and is_free(movement) and moves_stored(movement, spec.dtype)

        found = propagate_up(self.node, spec.block, crosses, spec.outer)
        if not found.steps:
            assert found.blocked is not None, "the first movement was not crossed"
            return _refuse_block(*found.blocked, spec, self.node, "above")
        return Crossing(
            (moved(found.source, quantize.params, found.moved),),
            lambda mover, values: [found.apply(mover, values[0])],
            None if is_free(first) else lambda: self._lifted_work(quantize, found),
        )

    def sink(self, operands: tuple[Dequantize, ...]) -> Crossing | Miss:
        """Move the quantized values, and dequantize the result."""
        (dequantize,) = operands
        step = moved_down(self.movement, dequantize)
        if isinstance(step, Miss):
            return step
        return Crossing(
            (moved(self.node, dequantize.params, [step]),),
            lambda mover, values: [self.movement.apply(mover, values[0])],
            lambda: self._sunk_work(dequantize),
            isinstance(self.movement, (Slice, Select)),
        )

    def shares_with(self, user: Node) -> bool:
        """A user that is a movement will follow; any user may stay for the sake of a product."""
        moves = movement_of(user) is not None or is_call(user, *SPLITS) or is_waited_for(user)
        return moves or vanishes(self.node) or feeds_product(self.node)

    def _lifted_work(self, quantize: Quantize, found: PropagatedUp) -> Work:
        return lifted_work(
            self.node,
            quantize.params.spec,
            [q.x for q in _parts(quantize, self.movement)],
            # Another part has paid for quantizing the source; CSE will make the two one.
            [] if _quantized_already(quantize, found) else [found.source],
            copies=copies(self.movement),
            goes=all(is_call(user, ops.quantize) for user in self.node.users),
        )

    def _sunk_work(self, dequantize: Dequantize) -> Work:
        spec = dequantize.params.spec
        own = passed(self.node, spec.dtype, spec.float_dtype)
        before: list[WorkRange] = []
        # Users that quantize again never materialize the moved floats.
        after = [] if vanishes(self.node) else [own]
        if len(dequantize.node.users) == 1:
            before.append(passed(dequantize.node, spec.dtype, spec.float_dtype))
        elif isinstance(self.movement, (Slice, Select)):
            # The other parts will follow, each with its share of the cost.
            before.append(own)
        if copies(self.movement):
            before.append(passed(self.node, spec.float_dtype, spec.float_dtype))
            after.append(passed(self.node, spec.dtype, spec.dtype))
        return before, after


def moved_down(movement: Movement, dequantize: Dequantize) -> Moved | Miss:
    """Move the parameters of a dequantize below a movement of its result."""
    spec = dequantize.params.spec
    if not moves_stored(movement, spec.dtype):
        return _refuse_dtype(movement, spec)
    step = move_levels(movement.forward, spec.block, spec.outer)
    if isinstance(step, Refusal):
        return _refuse_block(movement, step, spec, dequantize.node, "below")
    return step


def _is_long(last: Movement) -> bool:
    """Whether more movements than a quantize crosses end in ``last``."""
    step = last
    for _ in range(_MOST_MOVEMENTS):
        above = movement_of(step.source)
        if above is None:
            return False
        step = above
    return True


def _refuse_dtype(movement: Movement, spec: QuantSpec) -> Miss:
    text, details = "{} does not move {}", (movement_name(movement), dtype_name(spec.dtype))
    return Miss(MissCode.DTYPE, movement.node, text, *details, progress=2)


def _refuse_block(
    movement: Movement, failure: Refusal, spec: QuantSpec, x: Node, where: str
) -> Miss:
    text = "{} parameters in blocks of {} do not move {} {}: {}"
    blocks = spec.granularity(shape_of(x)), spec.block_text()
    details = *blocks, where, movement_name(movement), failure.reason
    return Miss(MissCode.GRANULARITY, movement.node, text, *details, progress=2)


def _parts(quantize: Quantize, movement: Movement) -> Iterator[Quantize]:
    """Yield the quantizes, with the same parameters, of this part and the others of its source.

    Parts of one tensor that are quantized alike are priced together.
    """
    yield quantize
    if not isinstance(movement, _PICKS):
        return
    # The source is quantized once for all parts.
    for user in islice(_users(movement.source), USERS):
        if not isinstance(movement_of(user), _PICKS) or user is movement.node:
            continue
        for reads in islice(user.users, USERS):
            other = as_quantize(reads)
            if other is not None and other.params.same_as(quantize.params):
                yield other
                break


def _users(x: Node) -> Iterator[Node]:
    """Yield the users of ``x``; of a split, its parts."""
    for user in x.users:
        parts = isinstance(user.meta.get("val"), (list, tuple))
        yield from user.users if parts else (user,)


def _quantized_already(quantize: Quantize, found: PropagatedUp) -> bool:
    """Whether the source is quantized with these parameters for another part of it."""
    params = quantize.params
    last = found.moved[-1]
    spec = params.spec.with_block(last.block, None if last.outer is None else last.outer.block)
    for user in islice(found.source.users, USERS):
        other = as_quantize(user)
        if other is None or other.x is not found.source or other.params.spec != spec:
            continue
        pairs = zip(_parameters(other.params), _parameters(params), strict=True)
        if all(_same_numbers(a, b) for a, b in pairs):
            return True
    return False


def _parameters(params: QuantParams) -> tuple[Node | None, ...]:
    return params.scale, params.zero_point, params.outer_scale


def _same_numbers(a: Node | None, b: Node | None) -> bool:
    """Whether two scales or zero points hold the same values, through whatever views."""
    if a is None or b is None:
        return a is b
    first, second = _unviewed(a), _unviewed(b)
    # Different nodes may be views of one constant, or of equal ones.
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
