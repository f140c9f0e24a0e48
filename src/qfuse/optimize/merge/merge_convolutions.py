"""Horizontal fusion of convolutions with one input into one with more output channels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch

from qfuse.cost import (
    Comparison,
    CostModel,
    pointwise_work,
    size_range,
)
from qfuse.ir.dtypes import bit_width
from qfuse.ir.graph.alias import leaves_graph
from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.graph.stage_graph import StageGraph
from qfuse.ir.movement.registry import movement_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.convolution import Convolution, as_convolution
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.optimize.merge.concat_qparams import concat_bias
from qfuse.optimize.merge.convolution_work import merged_work, separate_work
from qfuse.optimize.merge.siblings import (
    Facets,
    MergeSiblings,
    Sibling,
    concat_weight,
    refuse_parts,
    split_into,
)
from qfuse.rewrite.prelude import Miss, MissCode, Node, Rewriter, aten


class MergeConvolutions(MergeSiblings):
    """``conv(x, w1, b1)`` and ``conv(x, w2, b2)`` become parts of one ``conv(x, w, b)``.

    Before::

        x -> conv(dequantize(q1)) -> relu
        x -> conv(dequantize(q2)) -> conv

    After::

        x -> conv(dequantize(q)) -> split -> relu
                                          -> conv

    Every element of the result is the same expression of the same values, as for
    :class:`qfuse.optimize.merge.merge_linears.MergeLinears`, and weights, scales, zero points and
    biases are concatenated as there, along the output channels.

    Refuses: grouped convolutions, where a channel uses only some inputs; transposed ones; siblings
    that differ in strides, paddings, dilations, kernels or blocks after the output channels (the
    remaining siblings still merge); everything that
    :class:`qfuse.optimize.merge.merge_linears.MergeLinears` refuses of weights, biases and users;
    merges that the cost model finds slower at the smallest, the expected or the largest size, such
    as parts that have to be copied for their users, or quantized in a pass of their own.
    """

    name: ClassVar[str] = "merge-convolutions"

    def input_of(self, node: Node) -> Node | None:
        """Return the input of a convolution."""
        conv = as_convolution(node)
        return None if conv is None else conv.x

    def sibling(self, node: Node) -> Sibling | Miss:
        """View a convolution as one that may merge."""
        conv = as_convolution(node)
        assert conv is not None, "only convolutions are grouped"
        refused = _refuse_settings(conv)
        if refused is not None:
            return refused
        stored = as_dequantize(conv.weight)
        weight = conv.weight if stored is None else stored.q
        refused = refuse_parts(conv, stored, weight)
        if refused is not None:
            return refused
        shape = tuple(map(int, shape_of(weight)))
        return Sibling(conv, stored, weight, shape, _alike(conv, stored, shape))

    def price(self, group: Sequence[Sibling], program: StageGraph, cost: CostModel) -> Comparison:
        """Compare the separate convolutions with the merged one."""
        symbols = program.signature.symbols
        x = size_range(math.prod(shape_of(group[0].op.x)), symbols)
        outs = [size_range(math.prod(shape_of(s.op.node)), symbols) for s in group]
        before, after = separate_work(group, x, outs), merged_work(group, x, outs)
        bits = bit_width(dtype_of(group[0].op.node))
        # A part whose user needs dense memory is copied, which may cost more than is saved.
        after += [
            pointwise_work(out, [bits], [bits])
            for sibling, out in zip(group, outs, strict=True)
            if leaves_graph(sibling.op.node) or _wants_dense(sibling.op.node)
        ]
        return cost.compare(before, after)

    def merged(self, group: Sequence[Sibling], rw: Rewriter) -> Node:
        """Add the wide convolution and the split."""
        conv = as_convolution(group[0].op.node)
        assert conv is not None, "only convolutions are grouped"
        op = overload_of(conv.node)
        assert op is not None, "a convolution is a call"
        weight = concat_weight(group, rw)
        bias = concat_bias([(s.op.bias, s.n) for s in group], rw)
        wide = rw.call(op, conv.x, weight, bias, *conv.settings.values())
        split_into(wide, group, conv.axis, rw)
        return wide


def _refuse_settings(conv: Convolution) -> Miss | None:
    node = conv.node
    if conv.transposed:
        text = "it is transposed: the first axis of its weight is the input channels"
        return Miss(MissCode.ARGUMENT, node, text, progress=2)
    if conv.groups != 1:
        text = "it has {} groups, so a channel would use inputs that it did not use before"
        return Miss(MissCode.ARGUMENT, node, text, conv.groups, progress=2)
    if not conv.is_static:
        text = "its geometry is computed at run time"
        return Miss(MissCode.ARGUMENT, node, text, progress=2)
    return None


def _alike(conv: Convolution, stored: Dequantize | None, shape: tuple[int, ...]) -> Facets:
    """Return what siblings must have in common: their geometry, and the remaining blocks."""
    op = overload_of(conv.node)
    assert op is not None, "a convolution is a call"
    # Overloads spell the padding differently; the geometry has it as numbers.
    common = (("op", op.overloadpacket), *conv.geometry, ("kernel", shape[1:]))
    if stored is None:
        return common
    spec = stored.params.spec
    outer = None if spec.outer is None else spec.outer[1:]
    return *common, ("blocks", spec.block[1:]), ("blocks of the second level", outer)


def _wants_dense(node: Node) -> bool:
    """Whether a user of ``node``, or of a view of it, would copy a part of a wider result."""
    stack = [node]
    while stack:
        for user in stack.pop().users:
            op = overload_of(user)
            if movement_of(user) is not None:
                stack.append(user)
            elif op is not None and not (_reads_parts(user) or torch.Tag.pointwise in op.tags):
                # A library call needs dense memory; a loop reads a part at its strides.
                return True
    return False


def _reads_parts(user: Node) -> bool:
    """Whether an op that is not elementwise is as fast on a part as on a whole tensor."""
    return is_call(user, *ops.CANONICAL, aten.cat.default, aten.sym_size.int)
