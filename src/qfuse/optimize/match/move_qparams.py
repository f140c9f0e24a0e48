"""Apply movements to quantized values, to parameters, and to fake tensors during a match."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType
from typing import Any, TypeAlias

import torch
from torch.fx.node import map_arg

from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import constant_of, op_name
from qfuse.ir.movement.base import Moved, Movement, move_levels
from qfuse.ir.movement.collective import WAITS, Collective
from qfuse.ir.movement.gather import Gather
from qfuse.ir.movement.registry import EDGE_PADS, movement_of
from qfuse.ir.movement.reshape import Expand, Permute, Squeeze, Unsqueeze, View
from qfuse.ir.movement.slice import Flip
from qfuse.ir.movement.window import EdgePad
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.views import QuantParams, shape_of, tensor_of
from qfuse.ir.quant.spec import Block
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import same_shape, same_size
from qfuse.rewrite.node_mover import NodeMover
from qfuse.rewrite.prelude import Node, OpOverload, Rewriter, aten

_REPEATING = (
    aten.clone.default,
    aten.flip.default,
    aten.roll.default,
    aten.repeat.default,
    aten.repeat_interleave.self_int,
    aten.index_select.default,
    aten.index.Tensor,
    aten.embedding.default,
    aten.gather.default,
    *EDGE_PADS,
    *WAITS,
)
"""Movements that write a new tensor; the others are views."""

# Bounds the search along a chain of movements, so that a match costs the same in any graph.
_STEPS = 32


class GraphMover(NodeMover):
    """Applies ops to nodes of a graph; ops on constants are computed at compile time.

    Values are nodes, or tensors as long as they depend on constants only.
    """

    def call(self, op: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply an op."""
        if isinstance(value, torch.Tensor):
            if all(map(_is_known, (*args, *kwargs.values()))):
                with torch.no_grad():
                    return op(value, *args, **kwargs)
            # A symbolic size has no value at compile time,
            # so from here on the ops run in the graph.
            value = self.node(value, "moved")
        return super().call(op, value, *args, **kwargs)

    def at_run_time(self, value: Any) -> Node:
        """Return the node of a value."""
        return self.node(value, "moved")

    def open(self, node: Node) -> Any:
        """Return the value to apply ops to for ``node``: the tensor, if it is a constant."""
        value = constant_of(node)
        return node if value is None else value

    def node(self, value: Any, hint: str) -> Node:
        """Return the node of a value."""
        if isinstance(value, Node):
            return value
        return self._rw.constant(value, hint)

    def item(self, value: Node, index: int) -> Node:
        """Return one of several results."""
        return self._rw.item(value, index)

    def type_of(self, value: Node) -> torch.Tensor:
        """Return the fake tensor of a node's value."""
        return tensor_of(value)

    def typed(self, made: torch.Tensor, op: OpOverload, value: Node, *args: Any) -> Node:
        """Apply an op whose result has a known type."""
        return self._rw.replay(op, (value, *args), {}, made)


class ParamMover(GraphMover):
    """Applies ops to scales and zero points, whose strides do not matter.

    A view back to a shape that the value was viewed from returns that earlier node, and a
    permutation cancels its inverse, so parameters that move forward and back add no nodes.
    """

    def call(self, op: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply an op, unless its result exists already."""
        if isinstance(value, torch.Tensor):
            return super().call(op, value, *args, **kwargs)
        if op is aten.permute.default:
            return self._permute(value, args[0])
        if op in {aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dims}:
            return self._view(op, value, *args)
        return super().call(op, value, *args, **kwargs)

    def params(self, node: Node, steps: Iterable[Moved]) -> Node:
        """Move a scale or a zero point by all steps, in order."""
        start = value = self.open(node)
        for step in steps:
            value = step.apply(self, value)
        if value is start or (isinstance(value, torch.Tensor) and _is_same(value, start)):
            return node
        # The new constant is stored densely, not as a view of the old one.
        if isinstance(value, torch.Tensor):
            value = value.contiguous()
        return self.node(value, str(node.target))

    def _view(self, op: Any, value: Node, *args: Any) -> Node:
        made = FakeMover().call(op, tensor_of(value), *args)
        shown = list(_row_major_sources(value))
        for earlier in shown:
            if same_shape(shape_of(earlier), made.shape):
                return earlier
        # A reshape needs only the elements, so it skips the views in between.
        if op is aten.reshape.default:
            value = shown[-1]
        return self._rw.replay(op, (value, *args), {}, made)

    def _permute(self, value: Node, dims: Sequence[int]) -> Node:
        turned = movement_of(value)
        if isinstance(turned, Permute):
            # A permutation of a permutation is one permutation of its source.
            dims = [turned.dims[axis] for axis in dims]
            value = turned.source
        # Axes of size 1 may be anywhere: moving them is a view and not a permutation.
        shape = shape_of(value)
        real = [axis for axis in dims if not same_size(shape[axis], 1)]
        if real != sorted(real):
            return self._rw.call(aten.permute.default, value, list(dims))
        # Only axes of size 1 are permuted.
        sizes = self.sizes(value)
        return self._view(aten.reshape.default, value, [sizes[axis] for axis in dims])


class FakeMover:
    """Applies ops to fake tensors, so that a match knows strides without adding nodes."""

    def call(self, op: Any, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Apply an op."""
        known, named = map_arg((args, kwargs), lambda n: n.meta["val"])
        with torch.no_grad():
            return op(value, *known, **named)

    def sizes(self, node: Node) -> list[Any]:
        """Return the sizes."""
        return list(shape_of(node))

    def at_run_time(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value unchanged: only its type is known in any case."""
        return value

    def item(self, value: Sequence[torch.Tensor], index: int) -> torch.Tensor:
        """Return one of several results."""
        return value[index]

    def type_of(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value, which is a fake tensor."""
        return value

    def typed(self, made: torch.Tensor, *_: Any) -> torch.Tensor:
        """Return the result of an op, whose type is known."""
        return made


QuantizedMover: TypeAlias = GraphMover | FakeMover
"""Applies ops to quantized values: to nodes, or to fake tensors."""


@dataclass(frozen=True, slots=True)
class MovementStep:
    """One movement that is crossed, and its effect on the parameters."""

    movement: Movement
    moved: Moved


@dataclass(frozen=True, slots=True)
class PropagatedUp:
    """How far parameters move up a chain of movements.

    Attributes:
        steps: The movements crossed, from the last one upward.
        source: The value above them.
        block: The block at that value.
        blocked: The first movement that the parameters cannot cross, and why; ``None`` if none
            stopped.
    """

    steps: tuple[MovementStep, ...]
    source: Node
    block: Block
    blocked: tuple[Movement, Refusal] | None = None

    @property
    def moved(self) -> tuple[Moved, ...]:
        """The effect of every step on the parameters."""
        return tuple(step.moved for step in self.steps)

    def apply(self, mover: Any, value: Any) -> Any:
        """Apply all movements to another value of the source's shape."""
        for step in reversed(self.steps):
            value = step.movement.apply(mover, value)
        return value


def propagate_up(
    x: Node, block: Block, crosses: Callable[[Movement], bool], outer: Block | None = None
) -> PropagatedUp:
    """Move parameters of ``x`` up as far as possible and as ``crosses`` allows.

    Args:
        x: The value with the parameters.
        block: Their block.
        crosses: Whether a movement may be crossed.
        outer: The block of their second level of scales, if there is one.
    """
    steps: list[MovementStep] = []
    while len(steps) < _STEPS:
        movement = movement_of(x)
        if movement is None or not crosses(movement):
            break
        moved = move_levels(movement.backward, block, outer)
        if isinstance(moved, Refusal):
            return PropagatedUp(tuple(steps), x, block, (movement, moved))
        steps.append(MovementStep(movement, moved))
        x, block = movement.source, moved.block
        outer = None if moved.outer is None else moved.outer.block
    return PropagatedUp(tuple(steps), x, block)


def moved_params(rw: Rewriter, params: QuantParams, steps: Sequence[Moved]) -> QuantParams:
    """Move parameters by all steps, in order."""
    if not steps:
        return params
    mover = ParamMover(rw)
    scale = mover.params(params.scale, steps)
    zero = None if params.zero_point is None else mover.params(params.zero_point, steps)
    spec = params.spec
    if params.outer_scale is None:
        return QuantParams(spec.with_block(steps[-1].block), scale, zero)
    seconds = outer_steps(steps)
    outer = mover.params(params.outer_scale, seconds)
    return QuantParams(spec.with_block(steps[-1].block, seconds[-1].block), scale, zero, outer)


def outer_steps(steps: Sequence[Moved]) -> list[Moved]:
    """Return the effect of every step on the second level of scales, which must exist."""
    seconds = [step.outer for step in steps if step.outer is not None]
    assert len(seconds) == len(steps), "both levels of scales move, or none"
    return seconds


def copies(movement: Movement) -> bool:
    """Whether a movement writes a new tensor."""
    return is_call(movement.node, *_REPEATING)


def moves_stored(movement: Movement, dtype: torch.dtype) -> bool:
    """Whether an op supports a storage dtype: some do not support float8."""
    return not (isinstance(movement, (Flip, Gather, EdgePad)) and dtype.is_floating_point)


def is_free(movement: Movement) -> bool:
    """Whether crossing a movement with a quantize is never a loss.

    The movement shows all elements, once each or repeated, and nothing is copied twice: a copy with
    other users would copy both the float and the quantized values.
    """
    if copies(movement):
        return movement.bijective and len(movement.node.users) == 1
    return movement.bijective or isinstance(movement, Expand)


def movement_name(movement: Movement) -> str:
    """Return the usual name of a movement."""
    if isinstance(movement, Collective):
        return op_name(movement.start)
    return (
        "a split"
        if isinstance(movement.node.target, BuiltinFunctionType)
        else op_name(movement.node)
    )


def reads_any_strides(node: Node, *others: OpOverload) -> bool:
    """Whether all users of ``node`` accept any strides, or are ``others``; views do not."""
    return all(is_call(user, *ops.CANONICAL, *ops.FUSED, *others) for user in node.users)


def _row_major_sources(node: Node) -> Iterable[Node]:
    """Yield ``node`` and every value that it is a view of with all elements in the same order."""
    yield node
    for _ in range(_STEPS):
        movement = movement_of(node)
        if not isinstance(movement, (View, Unsqueeze, Squeeze)):
            return
        node = movement.source
        yield node


def _is_known(value: Any) -> bool:
    """Whether an argument depends neither on a node nor on a symbolic size."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_known, value))
    return not isinstance(value, (Node, torch.SymInt))


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether ``a`` is a view of ``b`` with the same elements in the same order."""
    return a.shape == b.shape and a.stride() == b.stride() and a.data_ptr() == b.data_ptr()
