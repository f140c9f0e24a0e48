"""Multiply with shared key and value heads where they are, instead of with copies of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from qfuse.ir.movement.base import Moved, unsqueeze
from qfuse.ir.movement.registry import movement_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.epilogue import Act, Add, Cast, EpilogueOp, Mul, Prelu
from qfuse.ir.ops.matmul import FusedMatmul, as_fused_matmul
from qfuse.ir.ops.views import QuantParams, shape_of, tensor_of
from qfuse.ir.quant.block import view_block
from qfuse.ir.quant.spec import Block
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import Size, is_one, same_size
from qfuse.optimize.match.move_qparams import moved_params
from qfuse.optimize.match.repeated_heads import HEADS, RepeatedHeads, repeated_heads
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


@dataclass(frozen=True, slots=True)
class BroadcastSite:
    """A product whose right operand repeats heads.

    Attributes:
        fused: The product.
        repeated: How the heads are repeated.
        params: The parameters of the heads before they are repeated, whose scale and zero point
            still have the rank of the repeated ones.
    """

    fused: FusedMatmul
    repeated: RepeatedHeads
    params: QuantParams


class BroadcastRepeatedHeads(Rule[BroadcastSite]):
    """A product with repeated heads becomes one that broadcasts the original heads.

    Before::

        k [b, 2, s, d] -> unsqueeze -> expand -> clone -> view [b, 8, s, d] -> transpose --.
        q [b, 8, m, d] ------------------------------------------------------ qfuse.matmul

    After::

        k -> view [b, 2, 1, s, d] -> transpose --.
        q -> view [b, 2, 4, m, d] ---------- qfuse.matmul -> view [b, 8, m, s]

    The same for ``repeat_interleave``, for values, and for ``[b, s, h, d]`` whose heads are
    repeated before they are transposed. The removed copies have the size of the KV cache times the
    group, for every decoded token.

    Refuses: a left operand with another number of heads, which would broadcast; scales that differ
    between copies, or have two levels; operands of the epilogue that are quantized, or are there
    for other heads; a result that is not quantized per tensor.
    """

    name = "broadcast-repeated-heads"
    anchors: ClassVar[tuple[OpOverload, ...]] = (ops.matmul,)
    exactness = Exactness.EXACT
    # A library may multiply broadcast operands in another order.
    proof = Exactness.ROUNDING

    def match(self, node: Node) -> BroadcastSite | Miss:
        """Match a product whose right operand repeats heads."""
        fused = as_fused_matmul(node)
        assert fused is not None, "the anchor is a fused product"
        repeated, params = repeated_heads(fused.other), fused.other_params
        if repeated is None or params is None:
            text = "the heads of its right operand are not copies"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        if any(p is not None and p.outer_scale for p in (params, fused.x_params, fused.out_params)):
            text = "its scales have two levels"
            return Miss(MissCode.GRANULARITY, node, text, progress=2)
        block = _block_of_heads(params.spec.block, repeated)
        if isinstance(block, Refusal):
            text = "{}, in blocks of {}"
            details = block.reason, params.spec.block_text()
            return Miss(MissCode.GRANULARITY, fused.other, text, *details, progress=2)
        site = BroadcastSite(fused, repeated, replace(params, spec=params.spec.with_block(block)))
        wrong = _refuse_left(site)
        if wrong is None and not repeated.is_one_head:
            wrong = _refuse_epilogue(fused, repeated)
        return wrong or site

    def rewrite(self, site: BroadcastSite, rw: Rewriter) -> None:
        """Split the heads of the left operand and of the result; broadcast the right ones."""
        old, count = site.fused.node, site.repeated.count
        other, other_params = _right(site, rw)
        fused = replace(site.fused, other=other, other_params=other_params)
        value = tensor_of(old)
        if site.repeated.is_one_head:
            rw.replace(old, rw.replay(fused.overload, fused.call_args(), {}, value))
            return
        x, x_params = _left(fused, count, rw)
        extras = tuple(_split(extra, count, rw) for extra in fused.extras)
        out = _result_params(fused, rw)
        fused = replace(fused, x=x, x_params=x_params, extras=extras, out_params=out)
        with torch.no_grad():
            value = value.reshape(_split_shape(value.shape, count))
        made = rw.replay(fused.overload, fused.call_args(), {}, value)
        sizes = rw.sizes(made, len(value.shape))
        sizes[HEADS - 1 : HEADS + 1] = [site.repeated.heads]
        rw.replace(old, rw.call(aten.reshape.default, made, sizes))


def _refuse_left(site: BroadcastSite) -> Miss | None:
    fused, repeated = site.fused, site.repeated
    shape = shape_of(fused.x)
    if len(shape) < -HEADS or not same_size(shape[HEADS], repeated.heads):
        text = "the left operand of shape {} does not have {} heads"
        details = tuple(shape), repeated.heads
        return Miss(MissCode.SHAPE, fused.node, text, *details, progress=3)
    if fused.x_params is None or repeated.is_one_head:
        return None
    block = fused.x_params.spec.block
    moved = view_block(block, shape, _split_shape(shape, repeated.count))
    if isinstance(moved, Refusal):
        text = "the heads of the left operand are not split: {}"
        return Miss(MissCode.GRANULARITY, fused.x, text, moved.reason, progress=3)
    return None


def _refuse_epilogue(fused: FusedMatmul, repeated: RepeatedHeads) -> Miss | None:
    if not all(map(_broadcasts, fused.epilogue.ops)):
        text = "an operand of its epilogue is quantized"
        return Miss(MissCode.GRANULARITY, fused.node, text, progress=3)
    for extra in fused.extras:
        shape = shape_of(extra)
        known = (1, repeated.heads)
        if len(shape) >= -HEADS and not any(same_size(shape[HEADS], size) for size in known):
            text = "an operand of its epilogue has the shape {}"
            return Miss(MissCode.SHAPE, extra, text, tuple(shape), progress=3)
    out = fused.out_params
    if out is not None and any(size is not None for size in out.spec.block):
        text = "its result is quantized in blocks of {}"
        return Miss(MissCode.GRANULARITY, fused.node, text, out.spec.block_text(), progress=3)
    return None


def _broadcasts(step: EpilogueOp) -> bool:
    """Whether an epilogue op is elementwise, with a float operand that broadcasts."""
    match step:
        case Act() | Cast() | Prelu() | Add(stored=None) | Mul(rounded=None, stored=None):
            return True
        case _:
            return False


def _split_shape(shape: Sequence[Size], count: int) -> list[Size]:
    """Return a shape with its heads in groups of ``count``; no axis of heads stays as it is."""
    if len(shape) < -HEADS:
        return list(shape)
    heads = shape[HEADS]
    parts = [1, 1] if is_one(heads) else [int(heads) // count, count]
    return [*shape[:HEADS], *parts, *shape[HEADS + 1 :]]


def _split(value: Node, count: int, rw: Rewriter) -> Node:
    shape = shape_of(value)
    if len(shape) < -HEADS:
        return value
    sizes = rw.sizes(value, len(shape))
    parts = [int(size) for size in _split_shape(shape, count)[HEADS - 1 : HEADS + 1]]
    sizes[HEADS : HEADS + 1] = parts
    return rw.call(aten.reshape.default, value, sizes)


def _left(fused: FusedMatmul, count: int, rw: Rewriter) -> tuple[Node, QuantParams | None]:
    x, params = _split(fused.x, count, rw), fused.x_params
    return x, None if params is None else _moved_with(x, params, rw)


def _moved_with(node: Node, params: QuantParams, rw: Rewriter) -> QuantParams:
    """Move the parameters of the source of ``node`` to ``node``."""
    movement = movement_of(node)
    assert movement is not None, "it is a view or a permutation"
    moved = movement.forward(params.spec.block)
    assert not isinstance(moved, Refusal), "the match has moved the block"
    return moved_params(rw, params, [moved])


def _block_of_heads(block: Block, repeated: RepeatedHeads) -> Block | Refusal:
    """Return the block of the right operand where each head is there once."""
    one = repeated.block_of_heads(block[HEADS])
    if isinstance(one, Refusal):
        return one
    heads = (None,) if repeated.is_one_head else (one, None)
    return (*block[:HEADS], *heads, *block[HEADS + 1 :])


def _right(site: BroadcastSite, rw: Rewriter) -> tuple[Node, QuantParams]:
    """Return the right operand with one copy of each head, and its parameters."""
    repeated, params = site.repeated, site.params
    parts = [1] if repeated.is_one_head else [repeated.heads // repeated.count, 1]
    other = repeated.without_copies(parts, rw)
    if not repeated.is_one_head:
        # There is one entry for all copies, along an axis of its own.
        step = Moved(params.spec.block, lambda mover, value: unsqueeze(mover, value, [HEADS]))
        params = moved_params(rw, params, [step])
    if not repeated.turned:
        return other, params
    *batch, row, column = range(len(shape_of(other)))
    return rw.call(aten.permute.default, other, [*batch, column, row]), params


def _result_params(fused: FusedMatmul, rw: Rewriter) -> QuantParams | None:
    """Return the parameters of the result, which are per tensor, with one more axis."""
    out = fused.out_params
    if out is None:
        return None
    block = (None, *out.spec.block)
    return moved_params(rw, out, [Moved(block, lambda mover, value: unsqueeze(mover, value, [0]))])
