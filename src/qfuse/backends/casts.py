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

_CASTS = (aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default)
_MOVES = (*MOVEMENT_OPS, *SPLITS, aten.cat.default, aten.contiguous.default)
_NARROW = frozenset({torch.float16, torch.bfloat16})


def rounds_by_casts(program: Program) -> bool:
    """Whether a value is cast to float16 or bfloat16, and then read as another float.

    An example are the two terms of a split: ``high = x.bfloat16().float(); low = x - high``. Unless
    it is told not to, Inductor reads the value before the cast in a loop that computes both.
    Results that are float16 or bfloat16 themselves are not meant: there, a value that was not
    rounded in between is as good.
    """
    floats = {node: value.dtype for node, value in program.values.items() if _is_float(value)}
    return any(
        _is_read_wider(node, floats)
        for node in program.module.graph.nodes
        if is_call(node, *_CASTS) and _is_narrowing(node, floats)
    )


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def _is_narrowing(cast: Node, floats: Mapping[Node, torch.dtype]) -> bool:
    source, result = floats.get(cast.all_input_nodes[0]), floats.get(cast)
    return result in _NARROW and source not in {None, result}


def _is_read_wider(cast: Node, floats: Mapping[Node, torch.dtype]) -> bool:
    """Whether a loop that reads the value, perhaps moved, gives another float."""
    stack, seen = [cast], {cast}
    while stack:
        for user in stack.pop().users:
            if is_call(user, *_MOVES) or user.target is operator.getitem:
                stack += {user} - seen
                seen.add(user)
            elif _is_loop(user) and floats.get(user) not in {None, floats[cast]}:
                return True
    return False


def _is_loop(node: Node) -> bool:
    """Whether the compiler computes the node in a loop; kernels read values that are stored."""
    op = overload_of(node)
    loops = {torch.Tag.pointwise, torch.Tag.reduction}
    return op is not None and (is_call(node, *_CASTS) or not loops.isdisjoint(op.tags))
