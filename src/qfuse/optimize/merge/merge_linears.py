"""Horizontal fusion of the linears with one input into one wide linear and a split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch

from qfuse.cost import (
    Bits,
    Comparison,
    ComputeKind,
    CostModel,
    SizeOrRange,
    linear_work,
    pointwise_work,
    size_range,
)
from qfuse.ir.dtypes import bit_width
from qfuse.ir.graph.alias import leaves_graph
from qfuse.ir.graph.stage_graph import StageGraph
from qfuse.ir.ops.linear import as_linear
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.optimize.merge.concat_qparams import concat_bias
from qfuse.optimize.merge.siblings import (
    MergeSiblings,
    Sibling,
    concat_weight,
    refuse_parts,
    split_into,
)
from qfuse.rewrite.prelude import Miss, MissCode, Node, Rewriter, aten

_MATRIX = 2


class MergeLinears(MergeSiblings):
    """``linear(x, w1, b1)`` and ``linear(x, w2, b2)`` become parts of one ``linear(x, w, b)``.

    Before::

        x -> linear(dequantize(q1)) -> view
        x -> linear(dequantize(q2)) -> silu

    After::

        x -> linear(dequantize(q)) -> split -> view
                                            -> silu

    Every element of the result is the same expression of the same values, so this is exact; a
    library may round a wider product differently, and the numeric check allows for that. Weights,
    scales, zero points and biases are concatenated at compile time. A missing bias among biased
    siblings is -0.0, which changes no sum, not even that of two zeros.

    Refuses: weights or biases that are computed at run time; weights with other users, which would
    be stored twice; a result that is split, or that
    has a stride-sensitive user such as ``as_strided``; siblings that differ in storage, arithmetic
    or float dtype (the remaining siblings still merge); merges that the cost model finds slower at
    the smallest, the expected or the largest size.
    """

    name: ClassVar[str] = "merge-linears"

    def input_of(self, node: Node) -> Node | None:
        """Return the input of a linear."""
        linear = as_linear(node)
        return None if linear is None else linear.x

    def sibling(self, node: Node) -> Sibling | Miss:
        """View a linear as one that may merge."""
        linear = as_linear(node)
        assert linear is not None, "only linears are grouped"
        stored = as_dequantize(linear.weight)
        weight = linear.weight if stored is None else stored.q
        # A vector as weight has no axis of output features to concatenate along.
        if len(shape_of(weight)) != _MATRIX or not shape_of(linear.x):
            return Miss(MissCode.SHAPE, weight, "its weight is not a matrix", progress=2)
        refused = refuse_parts(linear, stored, weight)
        if refused is not None:
            return refused
        return Sibling(linear, stored, weight, tuple(map(int, shape_of(weight))))

    def price(self, group: Sequence[Sibling], program: StageGraph, cost: CostModel) -> Comparison:
        """Compare the separate linears with the merged one."""
        return price(group, program, cost)

    def merged(self, group: Sequence[Sibling], rw: Rewriter) -> Node:
        """Add the wide linear and the split."""
        weight = concat_weight(group, rw)
        bias = concat_bias([(s.op.bias, s.n) for s in group], rw)
        wide = rw.call(aten.linear.default, group[0].op.x, weight, bias)
        split_into(wide, group, len(shape_of(wide)) - 1, rw)
        return wide


def price(
    group: Sequence[Sibling], program: StageGraph, cost: CostModel, m: SizeOrRange | None = None
) -> Comparison:
    """Compare the separate linears with the merged one; output parts are copied to their strides.

    Args:
        group: The linears.
        program: The graph that contains them.
        cost: Prices work.
        m: Rows of their input, instead of those that the graph declares.
    """
    if m is None:
        rows = math.prod(shape_of(group[0].op.x)[:-1], start=1)
        m = size_range(rows, program.signature.symbols)
    k = group[0].shape[1]
    bits, kind = _arithmetic(group[0])
    before = [linear_work(m, k, sibling.n, bits, kind) for sibling in group]
    after = [linear_work(m, k, sum(sibling.n for sibling in group), bits, kind)]
    # Output parts are copied, see `split_into`.
    after += [
        pointwise_work(m * sibling.n, [bits.out], [bits.out])
        for sibling in group
        if leaves_graph(sibling.op.node)
    ]
    return cost.compare(before, after)


def _arithmetic(sibling: Sibling) -> tuple[Bits, ComputeKind]:
    real = dtype_of(sibling.op.node)
    wide = bit_width(real)
    plain = ComputeKind.BF16 if real is torch.bfloat16 else ComputeKind.F32
    stored = sibling.stored
    if stored is None:
        return Bits(wide, wide, wide), plain
    spec = stored.params.spec
    activation = as_dequantize(sibling.op.x)
    if activation is None:
        return Bits(wide, spec.bits, wide), plain
    # Integer instructions need integers on both sides; otherwise floats are multiplied.
    dtype = activation.params.spec.dtype
    whole = not dtype.is_floating_point and not spec.dtype.is_floating_point
    kind = ComputeKind.INT8 if whole else plain
    return Bits(bit_width(dtype), spec.bits, wide), kind
