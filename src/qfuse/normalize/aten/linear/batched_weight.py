"""Products with a batch of quantized weights, such as those of experts, become linears."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from qfuse.ir.movement.base import Movement, TensorMover
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.constants import constant_params
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import dtype_of, has_values, node_of, shape_of
from qfuse.ir.quant.block import covers
from qfuse.ir.quant.spec import QuantSpec
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import is_one, same_size
from qfuse.normalize.aten.linear.weights import call_linear
from qfuse.normalize.match.constants import derived
from qfuse.normalize.match.lookup import lookup_of
from qfuse.normalize.match.quantized_values import moved_constant, quantized_values
from qfuse.patterns.quantized_operand import moved_operand
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    arguments,
    aten,
)

_BATCHED = 3
# Every weight is a call of a kernel.
_MOST_WEIGHTS = 128
_LEAST_ELEMENTS = 4096


@dataclass(frozen=True, slots=True)
class BatchedWeightSite:
    """A product with a batch of weights.

    Attributes:
        node: The product.
        x: The left factor, ``[E, M, K]``; of a matmul also ``[..., E, M, K]``, ``[..., 1, M, K]``,
            ``[M, K]`` or ``[K]``.
        home: The constant that holds the quantized weights.
        q: Its values as ``[E, K, N]``.
        scale: Their scales, in that order of axes.
        zero_point: Their zero points, or ``None``.
        spec: Their encoding, in that order of axes.
    """

    node: Node
    x: Node
    home: Node
    q: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    spec: QuantSpec


class ExpandBatchedWeight(Rule[BatchedWeightSite]):
    """``bmm(x, dequantize(w))`` with a constant ``w`` becomes one linear for every entry of it.

    Before::

        x [E, M, K], w [E, K, N] -> dequantize -> bmm

    After::

        x[e], w[e] -> dequantize -> linear, for all e -> stack

    Each weight then stays quantized and has the kernels of linears. The batch may be a view of a
    dequantized matrix. A ``matmul`` may have more axes before it, or multiply one activation by all
    weights.

    Rounding: a library may sum in another order.

    Refuses: weights that are not constant, or not scaled before the product; scales shared by some
    weights, or of two levels, or not on a grid behind a view; many weights, and small ones, whose
    calls would cost more than they save.
    """

    name = "expand-batched-weight"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.bmm.default, aten.matmul.default)
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> BatchedWeightSite | Miss:
        """Match a product whose right factor is a batch of dequantized weights."""
        a = arguments(node)
        x, right = node_of(a["self"]), node_of(a["mat2" if "mat2" in a else "other"])
        movements, base = moved_operand(right)
        made = as_dequantize(base)
        # A lookup reads ids of run time, and a view may read a size.
        fixed = all(len(movement.node.all_input_nodes) == 1 for movement in movements)
        if made is None or not fixed or len(shape_of(right)) != _BATCHED:
            return _no_weights(node, right)
        params, home = constant_params(made.params), moved_constant(made.q)
        if home is None or params is None or not has_values(home[1]):
            # A product of two activations is not a near miss: the weights are the core.
            text = "its weights are computed at run time"
            return Miss(MissCode.NOT_CONSTANT, made.q, text, progress=0)
        if made.params.spec.outer is not None:
            return _refuse_blocks(node, made.params.spec)
        stored = BatchedWeightSite(node, x, *home, *params, made.params.spec)
        site = _moved(stored, movements)
        if isinstance(site, Miss):
            return site
        return _refuse(node, x, site.spec, site.q) or site

    def rewrite(self, site: BatchedWeightSite, rw: Rewriter) -> None:
        """Add the linears, each with a constant of its own, and stack their results."""
        # Linears have the weight as [N, K].
        spec = site.spec.with_block((site.spec.block[2], site.spec.block[1]))
        results, count = [], site.q.shape[0]
        for index in range(count):

            def part(value: torch.Tensor, what: str, index: int = index) -> Node:
                entry = value[index if value.shape[0] > 1 else 0].t()
                return derived(rw, site.home, entry, f"{what}_{index}")

            zero = None if site.zero_point is None else part(site.zero_point, "zero_point")
            values, scale = part(site.q, "part"), part(site.scale, "scale")
            weight = rw.call(ops.dequantize, values, scale, zero, str(spec))
            x = site.x if count == 1 else _entry(rw, site.x, index)
            results.append(call_linear(rw, x, weight))
        if len(results) == 1 and _axis(site.x) >= 0:
            # Its batch is that of the activation, which one weight multiplies as it is.
            rw.replace(site.node, results[0])
            return
        axis = max(_axis(site.node), 0)
        rw.replace(site.node, rw.call(aten.stack.default, results, *((axis,) if axis else ())))


def _axis(value: Node) -> int:
    """Return the axis of the batch; negative if there is none."""
    return len(shape_of(value)) - _BATCHED


def _entry(rw: Rewriter, x: Node, index: int) -> Node:
    """Return what one weight is multiplied by."""
    axis = _axis(x)
    if axis < 0:
        return x
    return rw.call(aten.select.int, x, axis, 0 if is_one(shape_of(x)[axis]) else index)


def _moved(site: BatchedWeightSite, movements: Sequence[Movement]) -> BatchedWeightSite | Miss:
    """Move weights and their parameters as they are moved behind the dequantize."""
    mover = TensorMover()
    for movement in reversed(movements):
        moved = movement.forward(site.spec.block)
        if isinstance(moved, Refusal):
            text = "its weights are moved after they are scaled: {}"
            return Miss(MissCode.GRANULARITY, movement.node, text, moved.reason, progress=3)
        q, scale = movement.apply(mover, site.q), moved.apply(mover, site.scale)
        zero = None if site.zero_point is None else moved.apply(mover, site.zero_point)
        spec = site.spec.with_block(moved.block)
        site = replace(site, q=q, scale=scale, zero_point=zero, spec=spec)
    return site


def _refuse(node: Node, x: Node, spec: QuantSpec, q: torch.Tensor) -> Miss | None:
    if spec.block[0] != 1 and not covers(spec.block[0], q.shape[0]):
        return _refuse_blocks(node, spec)
    return refuse_calls(node, x, q)


def _refuse_blocks(node: Node, spec: QuantSpec) -> Miss:
    text = "its weights are scaled in blocks of {}"
    return Miss(MissCode.GRANULARITY, node, text, spec.block_text(), progress=3)


def refuse_calls(node: Node, x: Node, weights: torch.Tensor) -> Miss | None:
    """Refuse a batch that is broadcast, and weights that are too many or too small.

    Args:
        node: The product.
        x: Its left factor.
        weights: The batch of weights.
    """
    count, axis = weights.shape[0], _axis(x)
    # `matmul` broadcasts a batch of one, and one weight multiplies any batch.
    shared = axis < 0 or count == 1 or is_one(shape_of(x)[axis])
    if not shared and not same_size(shape_of(x)[axis], count):
        text = "whether one activation is multiplied by all weights depends on a size at run time"
        return Miss(MissCode.SHAPE, x, text, progress=3)
    size = weights[0].numel() if count else 0
    if not 1 <= count <= _MOST_WEIGHTS or size < _LEAST_ELEMENTS:
        text = "{} weights of {} elements are not worth a call of a kernel each"
        return Miss(MissCode.PROFIT, node, text, count, size, progress=3)
    return None


def _no_weights(node: Node, right: Node) -> Miss:
    stored = quantized_values(right)
    table = None if stored is None else lookup_of(stored.q)
    home = None if stored is None else moved_constant(stored.q)
    if stored is None or (table is None and home is None):
        text = "it multiplies no batch of dequantized weights"
        return Miss(MissCode.PATTERN, node, text, progress=0)
    text = "its weights are stored as {} and are not scaled before the product"
    return Miss(MissCode.NOT_QUANTIZED, stored.q, text, dtype_of(stored.q), progress=3)
