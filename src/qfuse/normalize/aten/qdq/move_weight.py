"""Weights of which a graph takes a part, or which it reorders, after they are dequantized."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from qfuse.ir.dtypes import FLOAT8
from qfuse.ir.movement.base import Moved, Movement, move_levels
from qfuse.ir.movement.gather import Index
from qfuse.ir.movement.registry import movement_of
from qfuse.ir.movement.slice import Flip, Roll, Select, Slice
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.constants import is_constant_expression
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.ir.ops.views import dtype_of, tensor_of
from qfuse.ir.refusal import Refusal
from qfuse.rewrite.node_mover import NodeMover
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    aten,
)

_VIEWS = (Slice, Select)
_COPIES = (Index, Flip, Roll)


@dataclass(frozen=True, slots=True)
class MovedWeight:
    """A movement of a dequantized weight.

    Attributes:
        movement: The movement.
        made: The dequantize.
        params: How its parameters are moved.
    """

    movement: Movement
    made: Dequantize
    params: Moved


class MoveWeight(Rule[MovedWeight]):
    """``slice(dequantize(w))`` of a weight becomes ``dequantize(slice(w))``.

    Before::

        const w [K, 2 * N] -> dequantize -+- slice -> mm
                                          '- slice -> mm

    After::

        const w -> slice -> dequantize -> mm
        const w -> slice -> dequantize -> mm

    The gate and the up projection in one weight, or GPTQ's input features in the order in which
    they were quantized. What is read is a constant then: a view of the stored weight, or a copy in
    its place.

    Exact: each value is dequantized as before.

    Refuses: parts that are known at run time only; parts of blocks; a copy of a weight with other
    users, which would be in memory twice, or one that is larger than the weight.
    """

    name = "move-weight"
    anchors: ClassVar[tuple[OpOverload, ...]] = (
        aten.slice.Tensor,
        aten.select.int,
        aten.index_select.default,
        aten.index.Tensor,
        aten.embedding.default,
        aten.flip.default,
        aten.roll.default,
    )
    exactness = Exactness.EXACT

    def match(self, node: Node) -> MovedWeight | Miss:
        """Match a movement of a dequantized constant."""
        movement = movement_of(node)
        made = None if movement is None else as_dequantize(movement.source)
        if movement is None or made is None or not isinstance(movement, (*_VIEWS, *_COPIES)):
            text = "it moves no dequantized weight"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        if not is_constant_expression(node):
            text = "it moves what is computed at run time, or by indices of run time"
            return Miss(MissCode.NOT_CONSTANT, node, text, progress=0)
        if isinstance(movement, _COPIES) and len(made.node.users) > 1:
            text = "{} has other users, so the weight would be in memory twice"
            return Miss(MissCode.SHARED, made.node, text, made.node.name, progress=2)
        # As many rows of a small table, such as one of relative positions, may be.
        if tensor_of(node).numel() > tensor_of(made.node).numel():
            text = "{} elements are read of a weight of {}"
            counts = tensor_of(node).numel(), tensor_of(made.node).numel()
            return Miss(MissCode.PROFIT, node, text, *counts, progress=2)
        spec = made.params.spec
        moved = move_levels(movement.forward, spec.block, spec.outer)
        if isinstance(moved, Refusal):
            return Miss(MissCode.GRANULARITY, node, moved.reason, progress=2)
        return MovedWeight(movement, made, moved)

    def rewrite(self, site: MovedWeight, rw: Rewriter) -> None:
        """Move the constant and its parameters, and dequantize that."""
        mover, params, moved = NodeMover(rw), site.made.params, site.params
        q, stored = site.made.q, dtype_of(site.made.q)
        # torch copies 8-bit floats in few of the ways in which it copies their bytes.
        in_bytes = isinstance(site.movement, _COPIES) and stored in FLOAT8
        if in_bytes:
            q = rw.call(aten.view.dtype, q, torch.uint8)
        q = site.movement.apply(mover, q)
        if in_bytes:
            q = rw.call(aten.view.dtype, q, stored)
        scale = moved.apply(mover, params.scale)
        zero = None if params.zero_point is None else moved.apply(mover, params.zero_point)
        outer, second = None, params.outer_scale
        if moved.outer is not None and second is not None:
            outer, second = moved.outer.block, moved.outer.apply(mover, second)
        spec = params.spec.with_block(moved.block, outer)
        moved_params = replace(params, spec=spec, scale=scale, zero_point=zero, outer_scale=second)
        rw.replace(site.movement.node, rw.call(ops.dequantize, *moved_params.call_args(q)))
