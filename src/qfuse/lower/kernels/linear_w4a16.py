"""qfuse's own weight-only linear: float activations, weights that stay four bits in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qfuse.kernels import KernelLibrary
from qfuse.lower.kernel.groups import fits_four_bits
from qfuse.lower.kernel.operands import check_platform
from qfuse.lower.kernel.protocol import Claim, LinearProblem, Refusal
from qfuse.lower.kernel.weight_only_operands import (
    RealWeights,
    check_real_weight,
    claim_of,
    zero_points_of,
)
from qfuse.rewrite.prelude import Node, Rewriter
from qfuse.targets.target import Target

_BITS = 4
_MOST_ZERO = 15


@dataclass(frozen=True, slots=True)
class LinearW4A16:
    """The row of ``qfuse::linear_w4a16``.

    Attributes:
        library: The compiled kernels, or why there are none.
        weights: Packs weights, for all rows of a lowering.
    """

    library: KernelLibrary
    weights: RealWeights
    name: str = "qfuse.linear_w4a16"

    def supported(self, target: Target) -> Refusal | None:
        """Refuse where the kernels could not be built."""
        return check_platform(self.library, target)

    def accepts(self, problem: LinearProblem) -> Claim | Refusal:
        """Take float activations and weights of at most 16 numbers, in groups or not."""
        return check_real_weight(problem) or _check_codes(problem) or claim_of(problem, _BITS)

    def emit(self, problem: LinearProblem, claim: Claim, rw: Rewriter) -> Node:
        """Add the call with the packed weight."""
        args = self.weights.arguments(problem, claim, _BITS, rw)
        return rw.call(torch.ops.qfuse.linear_w4a16.default, *args)


def _check_codes(problem: LinearProblem) -> Refusal | None:
    stored, params = problem.weight, problem.fused.weight_params
    assert stored is not None, "it is a constant"
    assert params is not None, "checked before"
    if not fits_four_bits(stored):
        return Refusal("the weight has numbers more than 15 apart, which four bits do not hold")
    zero, _ = zero_points_of(stored, params, _BITS)
    if zero.numel() and not 0 <= int(zero.min()) <= int(zero.max()) <= _MOST_ZERO:
        return Refusal("the weight has a zero point that is none of its 16 codes")
    return None
