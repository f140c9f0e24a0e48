"""qfuse's own int8 linear: stored numbers in, scales and the whole epilogue in the same pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx.node import Argument

from qfuse.cost.sizes import AtPoints
from qfuse.cost.work import Bits, ComputeKind, Work, linear_work
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.kernels import KernelLibrary
from qfuse.lower.kernel.operands import (
    BYTES,
    bits_of,
    channel_granularity,
    check_activation,
    check_bias,
    check_edge,
    check_epilogue,
    check_extras,
    check_platform,
    check_zero_point,
    float_out,
    output_args,
    scale_node,
    scale_vector,
    stored_zero,
    takes_output,
    typed,
)
from qfuse.lower.kernel.packing import Packer, signed_zero_point
from qfuse.lower.kernel.protocol import Claim, LinearProblem, Refusal, split_epilogue
from qfuse.lower.linear_rowwise.emit import call_pair, check_pair_output, pair_work
from qfuse.lower.linear_rowwise.match import Pair
from qfuse.rewrite.prelude import Node, Rewriter
from qfuse.targets.target import Target

# Sums are 32 bits wide: these many products of two bytes cannot overflow them.
_MOST_K = 1 << 16
_MOST_K_WITH_ZERO = 1 << 15


@dataclass(frozen=True, slots=True)
class LinearW8A8:
    """The row of ``qfuse::linear_w8a8``, ``linear_w8a8_quantized`` and ``linear_w8a8_rows``.

    Attributes:
        library: The compiled kernels, or why there are none.
        packer: Packs weights, for all rows of a lowering.
    """

    library: KernelLibrary
    packer: Packer
    name: str = "qfuse.linear_w8a8"

    def supported(self, target: Target) -> Refusal | None:
        """Refuse where the kernels could not be built."""
        return check_platform(self.library, target)

    def accepts(self, problem: LinearProblem) -> Claim | Refusal:
        """Take 8-bit activations per tensor or per row, 8-bit weights per tensor or channel."""
        for check in (check_activation, _check_weight, check_bias, check_epilogue):
            refusal = check(problem)
            if refusal is not None:
                return refusal
        fused = problem.fused
        output = fused.out_params is not None and takes_output(fused)
        return Claim(len(fused.epilogue.steps), output, _work(problem, output))

    def emit(self, problem: LinearProblem, claim: Claim, rw: Rewriter) -> Node:
        """Add the call with packed constants."""
        fused = problem.fused
        taken, _ = split_epilogue(problem, claim)
        args = [*self._operands(problem, rw), list(fused.extras) or None, str(taken), problem.real]
        if not claim.output:
            return rw.call(torch.ops.qfuse.linear_w8a8.default, *args, float_out(fused))
        assert fused.out_params is not None, "the claim covers the output"
        return rw.call(
            torch.ops.qfuse.linear_w8a8_quantized.default, *args, *output_args(fused.out_params, rw)
        )

    def accepts_pair(self, pair: Pair) -> Claim | Refusal:
        """Take the same linears, with a product of halves, and codes with a scale for each row."""
        problem = pair.problem
        for check in (check_activation, _check_weight, check_bias, check_extras):
            refusal = check(problem)
            if refusal is not None:
                return refusal
        refusal = check_pair_output(pair)
        if refusal is not None:
            return refusal
        return Claim(0, pair.rows is not None, pair_work(pair, problem.k, 8))

    def emit_pair(self, pair: Pair, rw: Rewriter) -> dict[int, Node]:
        """Add the call with packed constants."""
        problem = pair.problem
        fused = problem.fused
        operands = self._operands(problem, rw, halves=pair.halved)
        args = [*operands, list(fused.extras) or None, pair.steps, problem.real]
        kernels = torch.ops.qfuse
        ops = (kernels.linear_w8a8, kernels.linear_w8a8_quantized, kernels.linear_w8a8_rows)
        return call_pair(pair, args, ops, rw)

    def _operands(
        self, problem: LinearProblem, rw: Rewriter, *, halves: bool = False
    ) -> list[Argument]:
        fused = problem.fused
        x, w = fused.x_params, fused.weight_params
        assert x is not None, "accepted without activation params"
        assert w is not None, "accepted without weight params"
        packed = self.packer.pack(fused.weight, w, halves=halves)
        name, zero = fused.weight.target, packed.zero_point
        return [
            fused.x,
            scale_node(x, rw),
            None if x.zero_point is None else stored_zero(x.zero_point, x.spec.dtype, rw),
            rw.constant(packed.weight, f"{name}_packed"),
            rw.constant(packed.sums, f"{name}_sums"),
            scale_vector(w, torch.float32, problem.n, rw),
            None if zero is None else rw.constant(zero, f"{name}_zero"),
            None if fused.bias is None else typed(fused.bias, torch.float32, rw),
        ]


def _check_weight(problem: LinearProblem) -> Refusal | None:
    granularity = channel_granularity(problem)
    if isinstance(granularity, Refusal):
        return granularity
    params = problem.fused.weight_params
    assert params is not None, "a granularity needs params"
    if params.spec.dtype not in BYTES:
        return Refusal(f"the weight is stored as {params.spec.dtype}")
    parts = (problem.fused.weight, params.scale, params.zero_point)
    if any(p is not None and constant_of(p) is None for p in parts):
        return Refusal("the weight or its parameters are computed at run time")
    return (
        check_edge(params, "weight") or check_zero_point(params, "weight") or _check_depth(problem)
    )


def _check_depth(problem: LinearProblem) -> Refusal | None:
    stored, params = problem.weight, problem.fused.weight_params
    assert stored is not None, "it is a constant"
    assert params is not None, "a granularity needs params"
    # Bytes without a sign are packed as signed ones, and have a zero point then.
    most = _MOST_K if signed_zero_point(stored, params) is None else _MOST_K_WITH_ZERO
    if problem.k > most:
        return Refusal(f"{problem.k} input features could overflow its sums, {most} cannot")
    return None


def _work(problem: LinearProblem, output: bool) -> AtPoints[Work]:
    bits = Bits(8, 8, 8 if output else bits_of(float_out(problem.fused)))
    return linear_work(problem.rows, problem.k, problem.n, bits, ComputeKind.INT8)
