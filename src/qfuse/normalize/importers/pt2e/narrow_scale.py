"""Dequantizes in float64 whose results have the same bits in float32."""

from __future__ import annotations

import operator

import torch

from qfuse.ir.dtypes import BYTES, FLOATS
from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.qdq import as_choose
from qfuse.ir.ops.view_ops import RESHAPES
from qfuse.ir.ops.views import dtype_of, node_of
from qfuse.ir.quant.choose import Formula
from qfuse.normalize.importers.qdq import exact_difference
from qfuse.rewrite.prelude import Node, arguments

# Bounds the walk up from a scale.
_STEPS = 8
_HALVES = (torch.bfloat16, torch.float16)


def is_exact_in_float32(q: Node, scale: Node, zero_point: Node, real: torch.dtype) -> bool:
    """Whether ``((q - zero_point) * scale)`` in float64, cast to ``real``, is the same in float32.

    A difference that is exact in float16 has at most 11 bits. With a scale of 24 bits its product
    is exact in float64, so a cast to float32 rounds it once, as a product in float32 does. With a
    scale of at most 11 bits the product is exact in float32 too, so a narrower cast rounds the
    same number.
    """
    held = held_dtype(scale)
    if held is None or dtype_of(q) not in BYTES or real not in FLOATS:
        return False
    if dtype_of(zero_point).is_floating_point:
        return False
    small = exact_difference(q, zero_point, torch.float16)
    return small and (real is torch.float32 or held in _HALVES)


def held_dtype(scale: Node) -> torch.dtype | None:
    """Return the narrowest float dtype that is known to hold all values of a float64 scale."""
    node = scale
    for _ in range(_STEPS):
        if dtype_of(node) in FLOATS:
            return dtype_of(node)
        value = constant_value(node)
        if value is not None:
            return torch.float32 if torch.equal(value.float().double(), value) else None
        if is_call(node, *RESHAPES):
            node = node_of(arguments(node)["self"])
        elif node.target is operator.getitem and node.args[1] == 0:
            return _chosen_dtype(node_of(node.args[0]))
        elif (source := cast_source(node)) is not None:
            node = source
        else:
            return None
    return None


def _chosen_dtype(choose: Node) -> torch.dtype | None:
    # The formula computes in the dtype of its operand; others may compute in float64.
    chosen = as_choose(choose)
    if chosen is None or chosen.spec.formula is not Formula.TOKEN_ASYMMETRIC:
        return None
    dtype = dtype_of(chosen.x)
    return dtype if dtype in FLOATS else None
