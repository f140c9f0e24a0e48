"""Fuse a batch norm into the epilogue of a fused product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.memory_formats import CHANNELS
from qfuse.ir.ops.batch_norm import BATCH_NORMS
from qfuse.ir.ops.epilogue import Add, Mul
from qfuse.ir.ops.matmul import FusedMatmul
from qfuse.ir.ops.product import FusedProduct, kind_of
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.optimize.fuse.epilogue import append_op, extended, open_product
from qfuse.optimize.fuse.epilogue_operand import refuse_shape
from qfuse.optimize.match.batch_norm import factor_and_shift, normalized, refuse_training
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    arguments,
)


@dataclass(frozen=True, slots=True)
class EpilogueNormSite:
    """A fused op, and the batch norm that is its only user.

    Attributes:
        fused: The fused op.
        result: The normalized values.
        factor: What the norm multiplies by; float32, in a shape that broadcasts.
        shift: What it adds then.
    """

    fused: FusedProduct
    result: Node
    factor: torch.Tensor
    shift: torch.Tensor


class FuseBatchNorm(Rule[EpilogueNormSite]):
    """``batch_norm(qfuse.convolution(...))`` becomes one op with ``mul(0)|add(1,1.0)``.

    The same for ``qfuse.linear`` and ``qfuse.matmul``. A norm directly after a product with a
    weight is folded into the weight's scale and the bias where that is possible.

    Rounding: a factor and a summand are rounded instead of the steps of the norm.

    Refuses: an op with other users; a norm in training, whose statistics are results, or with
    statistics or parameters that are computed at run time; other dtypes than float32; a norm along
    another axis than the channels or features.
    """

    name = "fuse-batch-norm"
    anchors: ClassVar[tuple[OpOverload, ...]] = BATCH_NORMS
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> EpilogueNormSite | Miss:
        """Match a norm of an open fused op."""
        fused = open_product(arguments(node)["input"], node)
        if isinstance(fused, Miss):
            return fused
        training, result = refuse_training(node), normalized(node)
        if training is not None or isinstance(result, Miss):
            return training or result  # type: ignore[return-value]
        if {dtype_of(fused.node), dtype_of(result)} != {torch.float32}:
            text = "it normalizes {}, and the product of a factor would be rounded"
            return Miss(MissCode.DTYPE, node, text, dtype_of(fused.node), progress=3)
        return _site(fused, node, result)

    def rewrite(self, site: EpilogueNormSite, rw: Rewriter) -> None:
        """Replace the norm by the extended op."""
        fused = site.fused
        hint = fused.node.name if isinstance(fused, FusedMatmul) else str(fused.weight.target)
        factor = rw.constant(site.factor, f"{hint}_norm_factor")
        shift = rw.constant(site.shift, f"{hint}_norm_shift")
        scaled = extended(fused, Mul(len(fused.extras)), (factor,))
        append_op(scaled, site.result, Add(len(scaled.extras)), rw, (shift,))


def _site(fused: FusedProduct, node: Node, result: Node) -> EpilogueNormSite | Miss:
    shape = shape_of(fused.node)
    size = shape[CHANNELS] if len(shape) > CHANNELS else 1
    if not isinstance(size, int):
        text = "it normalizes along axis 1 of a {}, whose size is not known"
        return Miss(MissCode.AXIS, node, text, kind_of(fused), progress=3)
    spread = (size, *(1,) * (len(shape) - CHANNELS - 1))
    refusal = refuse_shape(fused, node, spread, "norm")
    if refusal is not None:
        return refusal
    parts = factor_and_shift(size, node)
    if isinstance(parts, Miss):
        return parts
    factor, shift = (part.float().reshape(spread) for part in parts)
    return EpilogueNormSite(fused, result, factor, shift)
