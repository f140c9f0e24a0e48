"""The order of the phases of the optimize stage, each with the reason for its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch._ops import OpOverload

from qfuse.ir.events import Missed
from qfuse.ir.graph.stage_graph import NormalGraph, OptimizedGraph, StageGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.stages.verify import verify
from qfuse.optimize.attention.broadcast_repeated_heads import BroadcastRepeatedHeads
from qfuse.optimize.attention.fuse_repeated_heads import FuseRepeatedHeads
from qfuse.optimize.attention.merge_queries import MergeQueries
from qfuse.optimize.claimed.attention import FuseAttention
from qfuse.optimize.claimed.average_pool import FuseAveragePool
from qfuse.optimize.claimed.elementwise import FuseElementwise
from qfuse.optimize.fold.batch_norm import FoldBatchNorm
from qfuse.optimize.fold.constants import FoldConstants
from qfuse.optimize.fold.factor import SinkFactor, SinkPowerOfTwo
from qfuse.optimize.fold.requantized_factor import FoldRequantizedFactor
from qfuse.optimize.fold.scale import FoldScale
from qfuse.optimize.fold.shift import FoldShift
from qfuse.optimize.fuse.activation import FuseActivationQuantize
from qfuse.optimize.fuse.convolution import FuseConvolution
from qfuse.optimize.fuse.convolution_pad import FusePad
from qfuse.optimize.fuse.epilogue_activation import FuseActivation
from qfuse.optimize.fuse.epilogue_add import FuseAdd
from qfuse.optimize.fuse.epilogue_batch_norm import FuseBatchNorm
from qfuse.optimize.fuse.epilogue_cast import FuseCast
from qfuse.optimize.fuse.epilogue_mul import FuseMul
from qfuse.optimize.fuse.epilogue_prelu import FusePrelu
from qfuse.optimize.fuse.epilogue_quick_gelu import FuseQuickGelu
from qfuse.optimize.fuse.gate import FuseGate
from qfuse.optimize.fuse.linear import FuseLinear
from qfuse.optimize.fuse.matmul import FuseMatmul
from qfuse.optimize.fuse.norm import FuseNormQuantize
from qfuse.optimize.fuse.output_quantize import FuseOutputQuantize
from qfuse.optimize.fuse.softmax import FuseSoftmaxQuantize
from qfuse.optimize.fuse.stored_norm import FuseStoredNorm
from qfuse.optimize.fuse.stored_softmax import FuseStoredSoftmax
from qfuse.optimize.images.batch_norm import FuseStoredBatchNorm
from qfuse.optimize.layout.row_major import MakeRowMajor
from qfuse.optimize.lower_precision import LowerPrecision
from qfuse.optimize.merge.cse import Combine
from qfuse.optimize.merge.merge_convolutions import MergeConvolutions
from qfuse.optimize.merge.merge_linears import MergeLinears
from qfuse.optimize.propagate.cancel_quantize import CancelQuantize
from qfuse.optimize.propagate.fuse_range import FuseRange
from qfuse.optimize.propagate.fuse_requantize import FuseRequantize
from qfuse.optimize.propagate.lift_choose import LiftChoose
from qfuse.optimize.propagate.lift_quantize import LiftQuantize
from qfuse.optimize.propagate.lift_requantize import LiftRequantize
from qfuse.optimize.propagate.sink_below_bag_lookup import SinkBelowBagLookup
from qfuse.optimize.propagate.sink_below_collective import SinkBelowCollective
from qfuse.optimize.propagate.sink_dequantize import SinkDequantize
from qfuse.optimize.spell.einsum import SpellEinsum
from qfuse.optimize.spell.product_sum import SpellProductSum
from qfuse.optimize.splits.cancel_split import CancelSplit
from qfuse.optimize.splits.merge_splits import MergeSplits
from qfuse.optimize.splits.sink_split import SinkSplit
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.graph_pass import Pass
from qfuse.rewrite.rewriter import GraphEditor
from qfuse.rewrite.rule import Rule
from qfuse.rewrite.scheduled import Phase, ScheduledRules

MOVING_RULES: tuple[type[Rule[Any]], ...] = (
    # Up: the choice of parameters first, so that the quantize that uses them can follow.
    LiftChoose,
    LiftQuantize,
    # Down, below every op that `optimize/commute` covers.
    SinkDequantize,
    SinkBelowBagLookup,
    # A factor that keeps them apart, once activations after it are part of the quantize.
    FoldRequantizedFactor,
    # Where the two meet: cancelling is cheapest, then one fused op, then two ops.
    CancelQuantize,
    FuseRange,
    FuseRequantize,
    LiftRequantize,
)
# A second round finds what duplicate nodes have hidden; a third rarely finds anything.
_ROUNDS = 4
# A round in which no rule fires is the last; most programs need one or two.
_SPLIT_ROUNDS = 16

FOLD_RULES: tuple[type[Rule[Any]], ...] = (
    FoldBatchNorm,
    FoldScale,
    FoldShift,
    SinkPowerOfTwo,
    SinkFactor,
)

SPLIT_RULES: tuple[type[Rule[Any]], ...] = (CancelSplit, MergeSplits, SinkSplit)

EPILOGUE_RULES: tuple[type[Rule[Any]], ...] = (
    FuseActivation,
    FusePrelu,
    FuseQuickGelu,
    FuseAdd,
    FuseMul,
    FuseBatchNorm,
    FuseCast,
    FuseOutputQuantize,
)

FUSION_RULES: tuple[type[Rule[Any]], ...] = (
    FuseLinear,
    FuseConvolution,
    SpellEinsum,
    SpellProductSum,
    FuseMatmul,
    FusePad,
    *EPILOGUE_RULES,
)

RESULT_RULES: tuple[type[Rule[Any]], ...] = (
    FuseNormQuantize,
    FuseActivationQuantize,
    FuseStoredBatchNorm,
    FuseSoftmaxQuantize,
)

INPUT_RULES: tuple[type[Rule[Any]], ...] = (FuseGate, FuseStoredNorm, FuseStoredSoftmax)

ATTENTION_RULES: tuple[type[Rule[Any]], ...] = (
    FuseRepeatedHeads,
    BroadcastRepeatedHeads,
    MergeQueries,
)

CLAIM_RULES: Mapping[OpOverload, type[Rule[Any]]] = MappingProxyType(
    {
        ops.elementwise: FuseElementwise,
        ops.average_pool: FuseAveragePool,
        ops.scaled_dot_product_attention: FuseAttention,
    }
)
"""Rules of ops that only backends run, by these ops."""

REWRITES: tuple[type[Rule[Any] | Pass], ...] = (
    *FOLD_RULES,
    *MOVING_RULES,
    SinkBelowCollective,
    *SPLIT_RULES,
    *FUSION_RULES,
    *RESULT_RULES,
    *INPUT_RULES,
    *ATTENTION_RULES,
    *CLAIM_RULES.values(),
    Combine,
    FoldConstants,
    MakeRowMajor,
    MergeLinears,
    MergeConvolutions,
    LowerPrecision,
)
"""Every rule and pass of this stage."""


Rules = Sequence[type[Rule[Any]]]


def move(
    program: StageGraph,
    context: RewriteContext,
    *,
    across_ranks: bool = False,
    also: Rules = (),
) -> Counter[str]:
    """Move quantization through movements until nothing changes; count the rules that fired.

    Only the misses of the last round are logged: earlier ones may be resolved by a later round.

    Args:
        program: The graph.
        context: Prices, permissions and proof.
        across_ranks: Send quantized values and their parameters between ranks. All ranks then have
            to make the same rewrites, or they deadlock.
        also: Further rules of the phase.
    """
    rules: list[type[Rule[Any]]] = [*MOVING_RULES, *also]
    if across_ranks:
        rules.append(SinkBelowCollective)
    return settle_rules(program, rules, context)


def settle_rules(program: StageGraph, rules: Rules, context: RewriteContext) -> Counter[str]:
    """Alternate between ``rules`` and CSE until nothing changes; :func:`move` does so with all."""
    fired: Counter[str] = Counter()
    quiet = replace(context, missed=[])
    # Only the misses of the last round: earlier ones may be resolved by the next round.
    left: list[Missed] = []
    apart: list[Missed] = []
    for _ in range(_ROUNDS):
        moved = apply_rules(program, [rule() for rule in rules], quiet)
        fired += moved.fired
        if not moved.modified:
            left = moved.missed
            break
        # Quantizes that reached the same value are now duplicates, which CSE can combine.
        combined = Combine().run(program, quiet)
        fired += combined.fired
        apart = combined.missed
    for event in (*left, *apart):
        context.miss(program, event)
    return fired


def sink_splits(program: StageGraph, context: RewriteContext, also: Rules = ()) -> Counter[str]:
    """Sink splits until nothing changes; count the rules that fired.

    Isomorphic ops are looked for far below a split, so a change there does not re-enqueue it.
    """
    fired: Counter[str] = Counter()
    quiet = replace(context, missed=[])
    for _ in range(_SPLIT_ROUNDS):
        sunk = apply_rules(program, _instances(SPLIT_RULES, also), quiet)
        fired += sunk.fired
        if not sunk.modified:
            for event in sunk.missed:
                context.miss(program, event)
            break
    return fired


def rules_for_claims(supported: Collection[OpOverload]) -> tuple[ScheduledRules, ...]:
    """Return the rules that make the ops which a backend supports, and which qfuse does not run.

    They run after products are fused, whose epilogues add, multiply and activate too.
    """
    rules = tuple(rule for op, rule in CLAIM_RULES.items() if op in supported)
    if not rules:
        return ()
    added = ScheduledRules(rules, after=Phase.FUSE)
    if FuseAttention not in rules:
        return (added,)
    # The phase of attention is later, and finds no copies of heads below a fused op. Without the
    # copies, views are left that a dequantize can cross.
    return ScheduledRules((FuseRepeatedHeads, SinkDequantize), after=Phase.FUSE), added


def _instances(*rules: Rules) -> list[Rule[Any]]:
    return [rule() for some in rules for rule in some]


def optimize(
    program: NormalGraph,
    context: RewriteContext | None = None,
    *,
    float_dtype: torch.dtype | None = None,
    added: Sequence[ScheduledRules] = (),
) -> OptimizedGraph:
    """Run every phase over ``program``, which is consumed.

    Args:
        program: The graph.
        context: Prices, permissions and proof.
        float_dtype: ``torch.bfloat16`` lowers the remaining float products; any other value keeps
            the source's dtypes.
        added: Rules of other packages.
    """
    outer = context or RewriteContext("optimize")
    # A later phase may fuse or remove a node at which an earlier one logged a miss.
    missed: list[Missed] = []
    context = replace(outer, missed=missed)

    def joining(phase: Phase) -> list[type[Rule[Any]]]:
        return [rule for some in added if some.group is phase for rule in some.rules]

    def run_after(phase: Phase) -> None:
        for some in added:
            if some.after is phase:
                apply_rules(program, _instances(some.rules), context)

    # Dead nodes would count as users.
    GraphEditor(program.module).sweep()
    # First, so that the quantizes of siblings are one node and a shared dequantize is visible.
    Combine().run(program, context)
    # After CSE, so that a cast of a shared weight is folded once.
    FoldConstants().run(program, context)
    # Constants around products first: they would keep activations and quantizes away from them.
    apply_rules(program, _instances(FOLD_RULES, joining(Phase.FOLD)), context)
    run_after(Phase.FOLD)
    # Before anything is fused with a norm or a product, whose kernels read and write rows.
    MakeRowMajor().run(program, context)
    # Quantize moves up, dequantize moves down, and where they meet they cancel. Before fusing, so
    # that quantize is next to the producer, and dequantize next to the consumer.
    move(program, context, also=joining(Phase.MOVE))
    run_after(Phase.MOVE)
    # Before fused ops exist, so that one pass serves linears of every kind.
    MergeLinears().run(program, context)
    MergeConvolutions().run(program, context)
    run_after(Phase.MERGE)
    # Isomorphic ops on the parts of a merged result become one op on the whole. Before fusing, so
    # that a linear can fuse it into its epilogue.
    sink_splits(program, context, joining(Phase.SPLIT))
    run_after(Phase.SPLIT)
    # Then extend products outward: operands first, then the epilogue, in the order of the source.
    for _ in range(_ROUNDS):
        apply_rules(program, _instances(FUSION_RULES, joining(Phase.FUSE)), context)
        # After linears, which fuse the residual sum before a norm, and the activation after the
        # linear, into a result that they write anyway. What is left costs a pass over memory.
        apply_rules(program, _instances(RESULT_RULES), context)
        # A dequantize that was fused into a linear can now move for its other users.
        if not move(program, context, also=joining(Phase.MOVE)):
            break
    run_after(Phase.FUSE)
    # After all rules that fuse a quantized product; the remaining products stay float.
    apply_rules(program, _instances(INPUT_RULES), context)
    # Ops that moved up load constants again; CSE makes these one.
    Combine().run(program, context)
    # When no quantization is left that could cross the copies that repeat heads; before lowering
    # precision, so that keys and values are cast once and not once per head.
    # Where there were copies, a dequantize can cross the views that are left.
    rules = _instances(ATTENTION_RULES, [SinkDequantize], joining(Phase.ATTENTION))
    apply_rules(program, rules, context)
    run_after(Phase.ATTENTION)
    # After fusion, so that only products that no fused op covers are lowered.
    if float_dtype is torch.bfloat16:
        LowerPrecision().run(program, context)
        # Fused products that are read in bfloat16 only were cast there.
        apply_rules(program, _instances([FuseCast]), context)
    names = {node.name for node in program.graph.nodes}
    for event in missed:
        if event.anchor.node in names:
            outer.miss(program, event)
    done = OptimizedGraph(program.module, program.signature, program.log)
    verify(done)
    return done
