"""Applies the dialects to a captured graph, and logs the quantized ops that none supports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from qfuse.ir.graph.stage_graph import CapturedGraph, NormalGraph
from qfuse.ir.stages.verify import verify
from qfuse.normalize.aten.int_matmul.in_float import FuseIntProduct
from qfuse.normalize.aten.int_matmul.layers import FuseIntLayer
from qfuse.normalize.aten.linear.cast_weight import DequantizeCast
from qfuse.normalize.aten.linear.drop_batch_expand import DropBatchExpand
from qfuse.normalize.aten.linear.left_weight import SwapWeight
from qfuse.normalize.aten.linear.scaled_addmm import FoldAddmmFactors
from qfuse.normalize.aten.linear.spell_matmul import SpellMatmul
from qfuse.normalize.aten.operands.cast_operand import DequantizeCastOperand
from qfuse.normalize.aten.operands.dequantize_operand import DequantizeOperand
from qfuse.normalize.aten.operands.lift_above_scale import LiftAboveScale
from qfuse.normalize.aten.operands.scaled_operand import DequantizeScaledOperand
from qfuse.normalize.aten.qdq.fold_constants import FoldStored
from qfuse.normalize.aten.qdq.merge_weights import MergeWeights
from qfuse.normalize.builtin import ATEN, BUILTIN
from qfuse.normalize.importers.dialect import Dialect, discover, rules_of
from qfuse.normalize.rounded import log_rounded
from qfuse.normalize.unrecognized import note_unrecognized
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rewriter import GraphEditor
from qfuse.rewrite.rule import Rule


def normalize(
    captured: CapturedGraph,
    context: RewriteContext | None = None,
    dialects: Sequence[Dialect] | None = None,
) -> NormalGraph:
    """Bring ``captured``, which is consumed, into canonical form.

    Ops that no rule matches stay as they are and work; quantized ones are named in the log.

    Args:
        captured: Functional ATen and source dialects.
        context: Prices, permissions and proof of the run.
        dialects: The dialects to apply; by default the built-in ones and those of installed
            packages.

    Returns:
        The same module, whose quantization is ``qfuse`` ops.

    Raises:
        NormalizeError: A quantized op is malformed, or can never run; or a dialect is broken.
    """
    known = (*BUILTIN, *discover()) if dialects is None else tuple(dialects)
    context = context or RewriteContext("normalize")
    # A malformed op is the user's to repair; an error of a rule costs only one rewrite.
    context = replace(context, raise_model_errors=True)
    apply_rules(captured, rules_of(known), context)
    # When every scale and correction of a product of integers has been found, and every weight
    # has been dequantized.
    if ATEN in known:
        last: list[Rule[Any]] = [
            FuseIntProduct(),
            FuseIntLayer(),
            DequantizeCast(),
            SwapWeight(),
            FoldStored(),
            # Again, for weights that the rules above dequantize.
            MergeWeights(),
            SpellMatmul(),
            LiftAboveScale(),
            DequantizeOperand(),
            DequantizeScaledOperand(),
            DequantizeCastOperand(),
            DropBatchExpand(),
            FoldAddmmFactors(),
        ]
        apply_rules(captured, last, context)
    # Such as the float weights that a quantizer left unused.
    GraphEditor(captured.module).sweep()
    normal = NormalGraph(captured.module, captured.signature, captured.log)
    if ATEN in known:
        log_rounded(normal, context.stage)
    note_unrecognized(normal, known, context.stage)
    verify(normal)
    return normal
