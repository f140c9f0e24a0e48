"""The work of storing results of the parts of a split, or one for all parts."""

from __future__ import annotations

import math

import torch

from qfuse.cost import pointwise_work, size_range, without_calls
from qfuse.cost.work import WorkRange
from qfuse.ir.dtypes import bit_width
from qfuse.ir.graph.schema import is_call
from qfuse.ir.movement.registry import movement_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import dtype_of
from qfuse.optimize.match.move_qparams import copies
from qfuse.rewrite.prelude import Node, OpOverload, aten

_LIBRARY: tuple[OpOverload, ...] = (
    *ops.FUSED,
    *(aten.linear.default, aten.mm.default, aten.bmm.default, aten.addmm.default),
    *(aten.matmul.default, aten.baddbmm.default, aten.convolution.default),
    aten.scaled_dot_product_attention.default,
)
"""Ops that load their operands from memory; others are fused with their producers."""


def is_read_from_memory(node: Node, inside: frozenset[Node]) -> bool:
    """Whether a user loads a value, or a view of it, from memory.

    All users are checked: missing one could turn a rewrite that pays into one that does not, and
    vice versa.
    """
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user in inside:
                continue
            if user.op == "output" or is_call(user, *_LIBRARY):
                return True
            movement = movement_of(user)
            shown = movement is not None and not copies(movement)
            if shown or as_dequantize(user) is not None:
                stack.append(user)
    return False


def pass_of_result(source: Node, value: torch.Tensor, *, absorbed: bool = False) -> WorkRange:
    """The work of computing a result from the split tensor, with about as many elements.

    As an epilogue it is written instead of the linear's result, without another call.
    """
    count = size_range(math.prod(value.shape))
    read, written = bit_width(dtype_of(source)), bit_width(value.dtype)
    if not absorbed:
        return pointwise_work(count, [read], [written])
    return without_calls(pointwise_work(count, [], [max(written - read, 0)]))


def is_narrower(value: torch.Tensor, source: Node) -> bool:
    """Whether the elements of ``value`` have fewer bits than those of ``source``."""
    return bit_width(value.dtype) < bit_width(dtype_of(source))


def round_trip(value: torch.Tensor) -> WorkRange:
    """The work of writing a value once and reading it once, in calls that are made anyway."""
    bits = bit_width(value.dtype)
    return without_calls(pointwise_work(size_range(math.prod(value.shape)), [bits], [bits]))
