"""The order of the phases, in one place, each with the reason for its place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from qfuse.ir.program import NormalGraph, OptimizedGraph
from qfuse.ir.verify import verify
from qfuse.optimize.combine import Combine
from qfuse.optimize.fuse_activation import FuseActivation
from qfuse.optimize.fuse_add import FuseAdd
from qfuse.optimize.fuse_cast import FuseCast
from qfuse.optimize.fuse_linear import FuseLinear
from qfuse.optimize.fuse_output_quantize import FuseOutputQuantize
from qfuse.optimize.merge_linears import MergeLinears
from qfuse.optimize.narrow_floats import NarrowFloats
from qfuse.rewrite.driver import Context, apply_rules

if TYPE_CHECKING:
    from typing import Any

    from qfuse.rewrite.rule import Rule

__all__ = ["FUSION_RULES", "optimize"]

FUSION_RULES: tuple[type[Rule[Any]], ...] = (
    FuseLinear,
    FuseActivation,
    FuseAdd,
    FuseCast,
    FuseOutputQuantize,
)


def optimize(
    program: NormalGraph,
    context: Context | None = None,
    *,
    float_dtype: torch.dtype | None = None,
) -> OptimizedGraph:
    """Run every phase over ``program``, which is consumed.

    Args:
        program: The graph.
        context: Prices, permissions and proof.
        float_dtype: ``torch.bfloat16`` narrows the float products that are left; anything else
            keeps the source's types.
    """
    context = context or Context("optimize")
    # First, so that the quantizes of siblings are one node and a shared dequantize is visible.
    Combine().run(program, context)
    # Before fused ops exist, so that one pass serves linears of every kind.
    MergeLinears().run(program, context)
    # Then grow linears outward: operands, then what follows, in the order of the source.
    apply_rules(program, [rule() for rule in FUSION_RULES], context)
    # After fusion, so that only what no fused op took is narrowed.
    if float_dtype is torch.bfloat16:
        NarrowFloats().run(program, context)
    done = OptimizedGraph(program.module, program.signature, program.log)
    verify(done)
    return done
