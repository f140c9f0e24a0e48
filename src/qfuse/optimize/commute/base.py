"""The interface of ops that quantize can be lifted above and dequantize can sink below."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Self, TypeAlias

from qfuse.cost.model import CostModel
from qfuse.cost.work import WorkRange
from qfuse.ir.graph.schema import is_call
from qfuse.ir.movement.base import Moved
from qfuse.ir.movement.registry import movement_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.convolution import as_convolution
from qfuse.ir.ops.linear import as_linear
from qfuse.ir.ops.matmul import as_matmul
from qfuse.ir.ops.qdq import Dequantize, Quantize, as_dequantize
from qfuse.ir.ops.views import QuantParams
from qfuse.ir.quant.spec import QuantSpec
from qfuse.optimize.match.memory_cost import passed, saved
from qfuse.optimize.match.move_qparams import QuantizedMover, moved_params
from qfuse.patterns.quantized_operand import is_quantized_activation
from qfuse.rewrite.prelude import Miss, MissCode, Node, OpOverload, Rewriter, aten

# A bound on the search among the users of a value.
USERS = 64
# A bound on the ops that are looked through below a value.
DEPTH = 8
_LOOKED_THROUGH = (aten.cat.default, aten.max_pool2d.default, aten.constant_pad_nd.default)

Work: TypeAlias = tuple[list[WorkRange], list[WorkRange]]
"""The memory traffic before, and after."""

Apply: TypeAlias = Callable[[QuantizedMover, Sequence[Any]], Iterable[Any]]
"""Applies the op to quantized values, one per operand; returns one per result, lazily."""


@dataclass(frozen=True, slots=True)
class End:
    """A float value on the other side of an op.

    Attributes:
        node: The value, which is quantized above the op or replaced by a dequantize below it.
        params: Builds its parameters.
    """

    node: Node
    params: Callable[[Rewriter], QuantParams]


def given(node: Node, params: QuantParams) -> End:
    """Return an end whose parameters already exist."""
    return End(node, lambda _: params)


def moved(node: Node, params: QuantParams, steps: Sequence[Moved]) -> End:
    """Return an end whose parameters have to be moved by every step."""
    return End(node, lambda rw: moved_params(rw, params, steps))


def unchanged(_: QuantizedMover, values: Sequence[Any]) -> Iterable[Any]:
    """Return quantized values unchanged: the new parameters include the op."""
    return values


@dataclass(frozen=True, slots=True)
class Crossing:
    """What replaces an op and the quantization that crosses it.

    Attributes:
        ends: The values that are quantized above the op, or dequantized below it.
        apply: The op on quantized values.
        work: Returns what both orders cost; ``None`` if the new order never costs more.
        parts: The ends are parts of a tensor, in the order of its axes. Their new values have that
            order too, without gaps, so they allow the same views.
    """

    ends: tuple[End, ...]
    apply: Apply = unchanged
    work: Callable[[], Work] | None = None
    parts: bool = False

    def gain(self, cost: CostModel) -> float | None:
        """Return the time saved: that of the bytes that are converted and copied."""
        return None if self.work is None else saved(cost, *self.work())


class Commutes(ABC):
    """One op that commutes with quantize or dequantize.

    Attributes:
        ops: The overloads of the family.
        folds: Whether the op is folded on quantized constants.
        node: The op.
        source: The operand that carries parameters, if there is one.
    """

    __slots__ = ()

    ops: ClassVar[tuple[OpOverload, ...]]
    folds: ClassVar[bool] = False
    node: Node
    source: Node

    @classmethod
    @abstractmethod
    def of(cls, node: Node) -> Self | Miss | None:
        """View a node; ``None`` if it is another op, a miss if its arguments are not supported."""

    @property
    def sources(self) -> tuple[Node, ...]:
        """The operands that carry parameters."""
        return (self.source,)

    @property
    def across_ranks(self) -> bool:
        """Whether it would send parameters between ranks, which all ranks have to do alike."""
        return False

    def lift(self, quantize: Quantize) -> Crossing | Miss:
        """Return how the sources are quantized instead of the result."""
        # Progress 0, as for an op of another kind: some families commute in one direction only.
        return Miss(MissCode.PATTERN, quantize.node, "a quantize cannot cross it", progress=0)

    def sink(self, operands: tuple[Dequantize, ...]) -> Crossing | Miss:
        """Return how the results are dequantized instead of the sources."""
        return Miss(MissCode.PATTERN, operands[0].node, "a dequantize cannot cross it", progress=0)

    # The default refuses, so a family that forgets to override
    # this fires too seldom, and never makes a model slower.
    def shares_with(self, user: Node) -> bool:
        """Whether a source may stay dequantized for ``user``, and so be dequantized twice."""
        del user
        return False


def vanishes(node: Node, depth: int = DEPTH) -> bool:
    """Whether every user of a dequantize would use its quantized values instead.

    Movements with one user, paddings, max pools and joins of dequantized values are looked through,
    up to ``depth`` of them.
    """
    # This decides profit and not legality, so a look at the first users may stand for all of them.
    return all(_uses_quantized(user, node, depth) for user in islice(node.users, USERS))


def feeds_product(node: Node) -> bool:
    """Whether a user of a dequantize is a product that would use its quantized values."""
    users = islice(node.users, USERS)
    return any(_is_product(user) and _uses_quantized(user, node, 0) for user in users)


def _is_product(user: Node) -> bool:
    views = as_linear(user), as_convolution(user), as_matmul(user)
    return any(view is not None for view in views)


def _uses_quantized(user: Node, node: Node, depth: int) -> bool:
    """Whether ``user`` would use quantized values instead of ``node``."""
    if is_call(user, ops.quantize):
        return True
    product = as_linear(user) or as_convolution(user)
    if product is not None:
        # A weight that is computed at run time is not one of a quantized op.
        return product.weight is not node and as_dequantize(product.weight) is not None
    if _feeds_matmul(user, depth):
        return True
    return depth > 0 and _is_looked_through(user, node, depth)


def _is_looked_through(user: Node, node: Node, depth: int) -> bool:
    """Whether ``user`` passes values of ``node`` on to ops that would use quantized ones."""
    if movement_of(user) is not None:
        (below,) = user.users if len(user.users) == 1 else (None,)
        # One user below each movement, so that the search is linear.
        return below is not None and _uses_quantized(below, user, depth - 1)
    if not is_call(user, *_LOOKED_THROUGH):
        return False
    parts = [part for part in user.all_input_nodes if part is not node]
    sinks = all(as_dequantize(p) is not None or is_call(p, *_LOOKED_THROUGH) for p in parts)
    return sinks and vanishes(user, depth - 1)


def _feeds_matmul(user: Node, depth: int) -> bool:
    """Whether ``user`` is a product of quantized activations, or a movement of its operand."""
    product = as_matmul(user)
    if product is not None:
        # A factor that is still there could not scale the product instead.
        sides = product.x, product.other
        return all(is_quantized_activation(operand, factors=False) for operand in sides)
    if not depth or movement_of(user) is None:
        return False
    users = list(islice(user.users, USERS))
    # One user below each movement, so that the search is linear.
    if len(users) == 1:
        return _feeds_matmul(users[0], depth - 1)
    return bool(users) and all(as_matmul(each) and _feeds_matmul(each, 0) for each in users)


def lifted_work(
    op: Node,
    spec: QuantSpec,
    before: Iterable[Node],
    after: Iterable[Node],
    *,
    copies: bool = True,
    goes: bool,
) -> Work:
    """Return what it costs to quantize, and to copy the quantized values.

    Args:
        op: The op.
        spec: The spec of the quantized values.
        before: The values that are quantized now.
        after: The values that would be quantized.
        copies: Whether the op writes a new tensor.
        goes: Whether the float op is erased together with the quantize.
    """
    old, new = (
        [passed(x, spec.float_dtype, spec.dtype) for x in nodes] for nodes in (before, after)
    )
    if copies:
        # The quantized copy comes in addition to the float copy, unless the float op goes.
        new.append(passed(op, spec.dtype, spec.dtype))
        if goes:
            old.append(passed(op, spec.float_dtype, spec.float_dtype))
    return old, new
