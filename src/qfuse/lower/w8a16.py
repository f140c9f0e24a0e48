"""qfuse's own weight-only linear: float activations, int8 weights that stay int8 in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from qfuse.cost.work import Bits, ComputeKind, linear_work
from qfuse.ir.program import constant_of
from qfuse.ir.views import dtype_of
from qfuse.lower.kernel import Claim, LinearProblem, Refusal, split_epilogue
from qfuse.lower.operands import (
    bits_of,
    channel_granularity,
    check_bias,
    check_edge,
    check_epilogue,
    check_zero_point,
    float_out,
    scale_vector,
    typed,
)
from qfuse.lower.packing import signed_zero_point

if TYPE_CHECKING:
    from torch.fx import Node

    from qfuse.kernels import KernelLibrary
    from qfuse.lower.packing import Packer
    from qfuse.rewrite.rewriter import Rewriter
    from qfuse.targets.target import Target

__all__ = ["LinearW8A16"]

_KINDS = {
    torch.float32: ComputeKind.F32,
    torch.bfloat16: ComputeKind.BF16,
    torch.float16: ComputeKind.F32,
}


@dataclass(frozen=True, slots=True)
class LinearW8A16:
    """The row of ``qfuse::linear_w8a16``.

    Attributes:
        library: The compiled kernels, or why there are none.
        packer: Packs weights, for all rows of a lowering.
    """

    library: KernelLibrary
    packer: Packer
    name: str = "qfuse.linear_w8a16"

    def supported(self, target: Target) -> Refusal | None:
        """Refuse where the kernels could not be built."""
        if target.device != "cpu":
            return Refusal(f"it is a CPU kernel, the target is {target.device}")
        return None if self.library.available else Refusal(self.library.reason)

    def accepts(self, problem: LinearProblem) -> Claim | Refusal:
        """Take float activations and symmetric int8 weights per tensor or per channel."""
        refusal = _check_operands(problem) or check_bias(problem) or check_epilogue(problem)
        if refusal is not None:
            return refusal
        bits = Bits(bits_of(problem.real), 8, bits_of(float_out(problem.fused)))
        work = linear_work(problem.rows, problem.k, problem.n, bits, _KINDS[problem.real])
        return Claim(len(problem.fused.epilogue.steps), False, work)

    def emit(self, problem: LinearProblem, claim: Claim, rw: Rewriter) -> Node:
        """Add the call with the packed weight."""
        fused = problem.fused
        params = fused.weight_params
        assert params is not None, "accepted without weight params"
        packed = self.packer.pack(fused.weight, params)
        return rw.call(
            torch.ops.qfuse.linear_w8a16.default,
            fused.x,
            rw.constant(packed.weight, f"{fused.weight.target}_packed"),
            scale_vector(params, torch.float32, problem.n, rw),
            None if fused.bias is None else typed(fused.bias, torch.float32, rw),
            list(fused.extras) or None,
            str(split_epilogue(problem, claim)[0]),
            float_out(fused),
        )


def _check_operands(problem: LinearProblem) -> Refusal | None:
    if problem.fused.x_params is not None:
        return Refusal("the activation is quantized")
    if problem.real not in _KINDS:
        return Refusal(f"the linear computes in {problem.real}")
    granularity = channel_granularity(problem)
    return granularity if isinstance(granularity, Refusal) else _check_weight(problem)


def _check_weight(problem: LinearProblem) -> Refusal | None:
    fused = problem.fused
    params = fused.weight_params
    assert params is not None, "a granularity needs params"
    parts = (fused.weight, params.scale, params.zero_point)
    if any(p is not None and constant_of(p) is None for p in parts):
        return Refusal("the weight or its parameters are computed at run time")
    stored = constant_of(fused.weight)
    if stored is None or stored.dtype is not torch.int8:
        return Refusal(f"the weight is stored as {dtype_of(fused.weight)}")
    refusal = check_edge(params, "weight") or check_zero_point(params, "weight")
    if refusal is not None:
        return refusal
    has_zero = signed_zero_point(stored, params) is not None
    return Refusal("the weight has a zero point") if has_zero else None
