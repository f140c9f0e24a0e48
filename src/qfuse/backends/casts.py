"""Casts to a narrower float that round on purpose: what reads the result computes in another."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch.fx import Node

from qfuse.backends.prepare import Program
from qfuse.ir.aten import aten
from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.movement.registry import MOVEMENT_OPS, SPLITS

_CASTS = (aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.copy.default)
_MOVES = (*MOVEMENT_OPS, *SPLITS, aten.cat.default, aten.contiguous.default)
# Their results are values of an operand, or its negative: they have no rounding of their own.
_SELECTIONS = (
    aten.abs.default,
    aten.amax.default,
    aten.amin.default,
    aten.clamp.default,
    aten.clamp.Tensor,
    aten.clamp_max.default,
    aten.clamp_min.default,
    aten.constant_pad_nd.default,
    aten.hardtanh.default,
    aten.masked_fill.Scalar,
    aten.max.dim,
    aten.maximum.default,
    aten.min.dim,
    aten.minimum.default,
    aten.neg.default,
    aten.relu.default,
    aten.where.self,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
)
_NARROW = frozenset({torch.float16, torch.bfloat16})


def rounds_by_casts(program: Program) -> bool:
    """Whether a value is cast to float16 or bfloat16, and then read as another float.

    An example are the two terms of a split: ``high = x.bfloat16().float(); low = x - high``. Unless
    it is told not to, Inductor reads the value before the cast in a loop that computes both.
    Results that are float16 or bfloat16 themselves are not meant: there, a value that was not
    rounded in between is as good.
    """
    dtypes = {
        node: value.dtype
        for node, value in program.values.items()
        if isinstance(value, torch.Tensor)
    }
    return any(
        _is_read_wider(node, dtypes)
        for node in program.module.graph.nodes
        if is_call(node, *_CASTS) and _is_narrowing(node, dtypes)
    )


def _is_narrowing(cast: Node, dtypes: Mapping[Node, torch.dtype]) -> bool:
    # The source of `copy` is its second operand.
    source, result = dtypes[cast.all_input_nodes[-1]], dtypes[cast]
    return result in _NARROW and source.is_floating_point and source != result


def _is_read_wider(cast: Node, dtypes: Mapping[Node, torch.dtype]) -> bool:
    """Whether a loop that reads the value, perhaps moved or selected, gives another float."""
    narrow = dtypes[cast]
    stack, seen = [cast], {cast}
    while stack:
        for user in stack.pop().users:
            same = is_call(user, *_SELECTIONS) and dtypes.get(user, narrow) == narrow
            if same or is_call(user, *_MOVES) or user.target is operator.getitem:
                stack += {user} - seen
                seen.add(user)
            elif _is_loop(user) and _tells_roundings_apart(dtypes.get(user), narrow):
                return True
    return False


def _tells_roundings_apart(result: torch.dtype | None, narrow: torch.dtype) -> bool:
    """Whether a result may show that an operand was not rounded: comparisons do as well."""
    if result is None:
        return False
    return result is torch.bool or (result.is_floating_point and result != narrow)


def _is_loop(node: Node) -> bool:
    """Whether the compiler computes the node in a loop; kernels read values that are stored."""
    op = overload_of(node)
    loops = {torch.Tag.pointwise, torch.Tag.reduction}
    return op is not None and (is_call(node, *_CASTS) or not loops.isdisjoint(op.tags))
