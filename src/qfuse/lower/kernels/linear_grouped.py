"""qfuse's linears with weights of four bits, and with scales that change along the inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch._ops import OpOverloadPacket
from torch.fx.node import Argument

from qfuse.cost.work import Bits, ComputeKind, linear_work
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.views import QuantParams
from qfuse.ir.quant.spec import dtype_range
from qfuse.kernels import KernelLibrary
from qfuse.lower.kernel.groups import first_code, fits_four_bits, group_count
from qfuse.lower.kernel.operands import (
    BYTES,
    bits_of,
    check_activation,
    check_bias,
    check_edge,
    check_epilogue,
    check_extras,
    check_platform,
    check_zero_point,
    float_out,
    output_args,
    rows_share_scale,
    scale_node,
    stored_zero,
    takes_output,
    typed,
)
from qfuse.lower.kernel.packing import Packer
from qfuse.lower.kernel.protocol import Claim, LinearProblem, Refusal, split_epilogue
from qfuse.lower.linear_rowwise.emit import call_pair, check_pair_output, pair_work
from qfuse.lower.linear_rowwise.match import Pair
from qfuse.rewrite.prelude import Node, Rewriter
from qfuse.targets.target import Target

_FOUR = 4
# Sums of a group are 32 bits wide, and so are products with its zero point.
_MOST_IN_GROUP = 1 << 15
# What a group costs beside its products, as that many more input features: to scale its sums takes
# about as long as 12 products, and its scale and sum are as many bytes as 12 codes of four bits.
_GROUP_COST = 12


@dataclass(frozen=True, slots=True)
class LinearGrouped:
    """The row of ``qfuse::linear_w4a8`` or ``qfuse::linear_w8a8_grouped``, with their kin.

    Attributes:
        library: The compiled kernels, or why there are none.
        packer: Packs weights, for all rows of a lowering.
        bits: Of a weight: 4 or 8.
    """

    library: KernelLibrary
    packer: Packer
    bits: Literal[4, 8]

    @property
    def name(self) -> str:
        """What the report calls it."""
        return "qfuse.linear_w4a8" if self.bits == _FOUR else "qfuse.linear_w8a8_grouped"

    def supported(self, target: Target) -> Refusal | None:
        """Refuse where the kernels could not be built."""
        return check_platform(self.library, target)

    def accepts(self, problem: LinearProblem) -> Claim | Refusal:
        """Take 8-bit activations per tensor or per row.

        Weights of four bits are at most 16 numbers, in groups or not; weights of eight bits are in
        groups.
        """
        refusal = self._check(problem) or check_epilogue(problem)
        if refusal is not None:
            return refusal
        fused = problem.fused
        output = fused.out_params is not None and takes_output(fused)
        bits = Bits(8, self.bits, 8 if output else bits_of(float_out(fused)))
        work = linear_work(problem.rows, _depth(problem), problem.n, bits, ComputeKind.INT8)
        return Claim(len(fused.epilogue.steps), output, work)

    def emit(self, problem: LinearProblem, claim: Claim, rw: Rewriter) -> Node:
        """Add the call with packed constants."""
        fused = problem.fused
        real, quantized, _ = self._ops()
        args = self._arguments(problem, str(split_epilogue(problem, claim)[0]), rw)
        if not claim.output:
            return rw.call(real.default, *args, float_out(fused))
        assert fused.out_params is not None, "the claim covers the output"
        return rw.call(quantized.default, *args, *output_args(fused.out_params, rw))

    def accepts_pair(self, pair: Pair) -> Claim | Refusal:
        """Take the same linears, with a product of halves, and codes with a scale for each row."""
        problem = pair.problem
        refusal = self._check(problem) or check_extras(problem) or check_pair_output(pair)
        if refusal is not None:
            return refusal
        return Claim(0, pair.rows is not None, pair_work(pair, _depth(problem), self.bits))

    def emit_pair(self, pair: Pair, rw: Rewriter) -> dict[int, Node]:
        """Add the call with packed constants."""
        args = self._arguments(pair.problem, pair.steps, rw, halves=pair.halved)
        return call_pair(pair, args, self._ops(), rw)

    def _check(self, problem: LinearProblem) -> Refusal | None:
        refusal = check_activation(problem) or check_bias(problem) or _check_weight(problem)
        if refusal is not None:
            return refusal
        return _check_codes(problem) if self.bits == _FOUR else _check_bytes(problem)

    def _ops(self) -> tuple[OpOverloadPacket, OpOverloadPacket, OpOverloadPacket]:
        """Return the kernels that give floats, codes with given parameters, and codes of rows."""
        ops = torch.ops.qfuse
        if self.bits == _FOUR:
            return ops.linear_w4a8, ops.linear_w4a8_quantized, ops.linear_w4a8_rows
        return (
            ops.linear_w8a8_grouped,
            ops.linear_w8a8_grouped_quantized,
            ops.linear_w8a8_grouped_rows,
        )

    def _arguments(
        self, problem: LinearProblem, steps: str, rw: Rewriter, *, halves: bool = False
    ) -> list[Argument]:
        """Return what all kernels of a row begin with."""
        fused = problem.fused
        x, w, name = fused.x_params, fused.weight_params, fused.weight.target
        assert x is not None, "accepted without activation params"
        assert w is not None, "accepted without weight params"
        packed = self.packer.pack_grouped(fused.weight, w, four=self.bits == _FOUR, halves=halves)
        zero = packed.zero_point
        return [
            fused.x,
            scale_node(x, rw),
            None if x.zero_point is None else stored_zero(x.zero_point, x.spec.dtype, rw),
            rw.constant(packed.weight, f"{name}_packed"),
            rw.constant(packed.sums, f"{name}_sums"),
            rw.constant(packed.scale, f"{name}_scales"),
            None if zero is None else rw.constant(zero, f"{name}_zeros"),
            problem.n,
            None if fused.bias is None else typed(fused.bias, torch.float32, rw),
            list(fused.extras) or None,
            steps,
            problem.real,
        ]


def _check_weight(problem: LinearProblem) -> Refusal | None:
    """Refuse weights that neither row takes."""
    fused = problem.fused
    params = fused.weight_params
    if params is None:
        return Refusal("the weight is not quantized")
    if params.spec.dtype.is_floating_point:
        return Refusal(f"the weight is stored as {params.spec.dtype}")
    if any(constant_of(part) is None for part in (fused.weight, *params.tensors)):
        return Refusal("the weight or its parameters are computed at run time")
    return check_edge(params, "weight") or _check_groups(problem, params)


def _check_groups(problem: LinearProblem, params: QuantParams) -> Refusal | None:
    groups = group_count(params.spec, problem.k)
    if isinstance(groups, Refusal):
        return groups
    length = problem.k // groups
    if length > _MOST_IN_GROUP:
        return Refusal(f"{length} products could overflow its sums, {_MOST_IN_GROUP} cannot")
    return None


def _check_codes(problem: LinearProblem) -> Refusal | None:
    stored, params = problem.weight, problem.fused.weight_params
    assert stored is not None, "it is a constant"
    assert params is not None, "checked before"
    if not fits_four_bits(stored):
        return Refusal("the weight has numbers more than 15 apart, which four bits do not hold")
    least = first_code(stored, params.spec)
    low, high = dtype_range(torch.int8)
    if any(not low <= zero - least <= high for zero in _extremes(params)):
        return Refusal("the weight has a zero point too far from its numbers for 8 bits")
    return None


def _extremes(params: QuantParams) -> tuple[int, ...]:
    zero = None if params.zero_point is None else constant_of(params.zero_point)
    if zero is None or not zero.numel():
        return (0,)
    return int(zero.min()), int(zero.max())


def _check_bytes(problem: LinearProblem) -> Refusal | None:
    params = problem.fused.weight_params
    assert params is not None, "checked before"
    if params.spec.dtype not in BYTES:
        return Refusal(f"the weight is stored as {params.spec.dtype}")
    if rows_share_scale((1, params.spec.block[1]), (problem.n, problem.k)):
        return Refusal("the weight's scales do not change along its inputs")
    return check_zero_point(params, "weight")


def _depth(problem: LinearProblem) -> int:
    """Return the input features, and what else costs as much as one."""
    params = problem.fused.weight_params
    assert params is not None, "checked before"
    groups = group_count(params.spec, problem.k)
    assert isinstance(groups, int), "checked before"
    # One group is scaled behind all products, as rows without groups do it.
    return problem.k + (groups * _GROUP_COST if groups > 1 else 0)
