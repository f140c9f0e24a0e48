"""Ops that return the same values for the same operands, and have no effect."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from qfuse.ir.aten import aten
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.ops import library as ops

# A result without defined values.
_EMPTY = frozenset(
    (
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_permuted.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    )
)
# A dequantize of constants stays: its operands are smaller, and kernels read them.
_CANONICAL = frozenset((ops.quantize, ops.requantize, ops.choose_qparams))


def folds_exactly(node: Node) -> bool:
    """Whether ``node`` calls an op that is deterministic and writes to nothing.

    Ops of other libraries do not count: their effects are not known. Nor does ``dequantize``.
    """
    if node.target is operator.getitem:
        return True
    op = overload_of(node)
    if op is None or op in _EMPTY or torch.Tag.nondeterministic_seeded in op.tags:
        return False
    if op.namespace != "aten" and op not in _CANONICAL:
        return False
    return not op._schema.is_mutable  # noqa: SLF001
