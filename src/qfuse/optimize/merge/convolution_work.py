"""The predicted work of convolutions that may merge."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.fx import Node

from qfuse.cost import (
    AtPoints,
    ComputeKind,
    SizeOrRange,
    Work,
    WorkRange,
    at_points,
    pointwise_work,
)
from qfuse.ir.dtypes import BYTES, bit_width
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.qdq import Quantize, as_dequantize, as_quantize
from qfuse.ir.ops.views import dtype_of
from qfuse.optimize.merge.siblings import Sibling

_BYTE = 1
# Epilogue ops between a convolution and the quantize of its result.
_MOST_STEPS = 8


def separate_work(
    group: Sequence[Sibling], x: SizeOrRange, outs: Sequence[SizeOrRange]
) -> list[WorkRange]:
    """Return the work of the convolutions of ``group``, each alone.

    A quantized one returns quantized values if its result is quantized with given parameters.
    """
    stored = _are_quantized(group)
    return [
        _work(s, x, [out], s.n, stored, narrow=stored and result_quantize(s.op.node) is not None)
        for s, out in zip(group, outs, strict=True)
    ]


def merged_work(
    group: Sequence[Sibling], x: SizeOrRange, outs: Sequence[SizeOrRange]
) -> list[WorkRange]:
    """Return the work of one convolution, and of quantizing its parts.

    Parts that are quantized with the same parameters are quantized as a whole.
    """
    stored = _are_quantized(group)
    quantizes = [result_quantize(s.op.node) for s in group]
    found = [quantize for quantize in quantizes if quantize is not None]
    # With one set of parameters, the wide convolution quantizes its result in its epilogue.
    narrow = stored and len(found) == len(group) and _agree(found)
    work = [_work(group[0], x, outs, sum(s.n for s in group), stored, narrow=narrow)]
    if stored and not narrow:
        bits = bit_width(dtype_of(group[0].op.node))
        parts = zip(quantizes, outs, strict=True)
        # Loops of their own: a separate convolution would quantize its result in its epilogue.
        work += [pointwise_work(o, [bits], [8]) for q, o in parts if q is not None]
    return work


def result_quantize(node: Node) -> Quantize | None:
    """Return the quantize with constant parameters that an epilogue leads to, if there is one."""
    for _ in range(_MOST_STEPS):
        # With other users the float result is stored anyway.
        if len(node.users) != 1:
            return None
        (node,) = node.users
        quantize, op = as_quantize(node), overload_of(node)
        if quantize is not None:
            given = all(constant_of(part) is not None for part in quantize.params.tensors)
            return quantize if given else None
        if op is None or torch.Tag.pointwise not in op.tags:
            return None
    return None


def _are_quantized(group: Sequence[Sibling]) -> bool:
    """Whether an integer kernel multiplies quantized values of 8 bits."""
    x = as_dequantize(group[0].op.x)
    stored = [None if s.stored is None else s.stored.params.spec.dtype for s in group]
    types = [None if x is None else x.params.spec.dtype, *stored]
    # Convolutions of other storage have no integer kernel, and multiply floats.
    return all(t in BYTES for t in types)


def _agree(quantizes: Sequence[Quantize]) -> bool:
    first = quantizes[0].params
    return all(each.params.same_as(first) for each in quantizes)


def _work(
    sibling: Sibling,
    x: SizeOrRange,
    outs: Sequence[SizeOrRange],
    n: int,
    stored: bool,
    *,
    narrow: bool,
) -> AtPoints[Work]:
    """Return the work of one convolution.

    Args:
        sibling: Gives the kernel and the float dtype.
        x: Elements of the input.
        outs: Elements of each part of the result.
        n: Output channels.
        stored: Whether input and weight are quantized.
        narrow: Whether the result is.
    """
    real = dtype_of(sibling.op.node)
    kind = ComputeKind.BF16 if real is torch.bfloat16 else ComputeKind.F32
    depth = math.prod(sibling.shape[1:])
    # A weight that is quantized below a float input is dequantized before the product.
    size = _BYTE if stored else real.itemsize
    out_size = _BYTE if narrow else real.itemsize

    def build(read: int, *written: int) -> Work:
        # Every output element is a sum over the kernel and all input channels.
        return Work(
            flops=2.0 * sum(written) * depth,
            kind=ComputeKind.INT8 if stored else kind,
            weight_bytes=float(n * depth * size),
            reads=(float(read * size),),
            writes=(float(sum(written) * out_size),),
        )

    return at_points(build, x, *outs)
