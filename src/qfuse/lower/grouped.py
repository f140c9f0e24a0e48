"""qfuse's linears with weights of four bits, and with scales that change along the inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from qfuse.cost.work import Bits, ComputeKind, linear_work
from qfuse.ir.program import constant_of
from qfuse.ir.quant_spec import dtype_range
from qfuse.lower.groups import first_code, fits_four_bits, group_count
from qfuse.lower.kernel import Claim, LinearProblem, Refusal, split_epilogue
from qfuse.lower.operands import (
    bits_of,
    check_bias,
    check_edge,
    check_epilogue,
    check_zero_point,
    float_out,
    rows_share_scale,
    scale_node,
    typed,
)
from qfuse.lower.w8a8 import check_activation, output_args, stored_zero, takes_output

if TYPE_CHECKING:
    from torch.fx import Node
    from torch.fx.node import Argument

    from qfuse.cost.sizes import AtPoints
    from qfuse.cost.work import Work
    from qfuse.ir.views import QuantParams
    from qfuse.kernels import KernelLibrary, PackedGroups
    from qfuse.lower.packing import Packer
    from qfuse.rewrite.rewriter import Rewriter
    from qfuse.targets.target import Target

__all__ = ["LinearW4A8", "LinearW8A8Grouped"]

_BYTES = (torch.int8, torch.uint8)
# Sums of a group are 32 bits wide, and so are products with its zero point.
_MOST_IN_GROUP = 1 << 15
# What a group costs beside its products, as that many more input features: to scale its sums takes
# about as long as 16 products, and its scale and sums are as many bytes as 16 codes of four bits.
_GROUP_COST = 16


@dataclass(frozen=True, slots=True)
class LinearW4A8:
    """The row of ``qfuse::linear_w4a8`` and ``qfuse::linear_w4a8_quantized``.

    Attributes:
        library: The compiled kernels, or why there are none.
        packer: Packs weights, for all rows of a lowering.
    """

    library: KernelLibrary
    packer: Packer
    name: str = "qfuse.linear_w4a8"

    def supported(self, target: Target) -> Refusal | None:
        """Refuse where the kernels could not be built."""
        return _supported(self.library, target)

    def accepts(self, problem: LinearProblem) -> Claim | Refusal:
        """Take 8-bit activations per tensor or per row, and weights of at most 16 numbers."""
        return _check(problem) or _check_codes(problem) or _claim(problem, 4)

    def emit(self, problem: LinearProblem, claim: Claim, rw: Rewriter) -> Node:
        """Add the call with packed constants."""
        params = problem.fused.weight_params
        assert params is not None, "accepted without weight params"
        packed = self.packer.pack_grouped(problem.fused.weight, params, four=True)
        args = _arguments(problem, claim, packed, rw)
        if claim.output:
            return rw.call(torch.ops.qfuse.linear_w4a8_quantized.default, *args)
        return rw.call(torch.ops.qfuse.linear_w4a8.default, *args)


@dataclass(frozen=True, slots=True)
class LinearW8A8Grouped:
    """The row of ``qfuse::linear_w8a8_grouped`` and ``qfuse::linear_w8a8_grouped_quantized``.

    Attributes:
        library: The compiled kernels, or why there are none.
        packer: Packs weights, for all rows of a lowering.
    """

    library: KernelLibrary
    packer: Packer
    name: str = "qfuse.linear_w8a8_grouped"

    def supported(self, target: Target) -> Refusal | None:
        """Refuse where the kernels could not be built."""
        return _supported(self.library, target)

    def accepts(self, problem: LinearProblem) -> Claim | Refusal:
        """Take 8-bit activations per tensor or per row, and 8-bit weights in groups."""
        return _check(problem) or _check_bytes(problem) or _claim(problem, 8)

    def emit(self, problem: LinearProblem, claim: Claim, rw: Rewriter) -> Node:
        """Add the call with packed constants."""
        params = problem.fused.weight_params
        assert params is not None, "accepted without weight params"
        packed = self.packer.pack_grouped(problem.fused.weight, params, four=False)
        args = _arguments(problem, claim, packed, rw)
        if claim.output:
            return rw.call(torch.ops.qfuse.linear_w8a8_grouped_quantized.default, *args)
        return rw.call(torch.ops.qfuse.linear_w8a8_grouped.default, *args)


def _supported(library: KernelLibrary, target: Target) -> Refusal | None:
    if target.device != "cpu":
        return Refusal(f"it is a CPU kernel, the target is {target.device}")
    return None if library.available else Refusal(library.reason)


def _check(problem: LinearProblem) -> Refusal | None:
    """Refuse what neither row takes."""
    fused = problem.fused
    params = fused.weight_params
    refusal = check_activation(problem) or check_bias(problem) or check_epilogue(problem)
    if refusal is not None:
        return refusal
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
    if params.spec.dtype not in _BYTES:
        return Refusal(f"the weight is stored as {params.spec.dtype}")
    if rows_share_scale((1, params.spec.block[1]), (problem.n, problem.k)):
        return Refusal("the weight's scales do not change along its inputs")
    return check_zero_point(params, "weight")


def _claim(problem: LinearProblem, weight_bits: int) -> Claim:
    fused = problem.fused
    output = fused.out_params is not None and takes_output(fused)
    return Claim(len(fused.epilogue.steps), output, _work(problem, weight_bits, output))


def _work(problem: LinearProblem, weight_bits: int, output: bool) -> AtPoints[Work]:
    params = problem.fused.weight_params
    assert params is not None, "checked before"
    groups = group_count(params.spec, problem.k)
    assert isinstance(groups, int), "checked before"
    # One group is scaled behind all products, as rows without groups do it.
    depth = problem.k + (groups * _GROUP_COST if groups > 1 else 0)
    bits = Bits(8, weight_bits, 8 if output else bits_of(float_out(problem.fused)))
    return linear_work(problem.rows, depth, problem.n, bits, ComputeKind.INT8)


def _arguments(
    problem: LinearProblem, claim: Claim, packed: PackedGroups, rw: Rewriter
) -> list[Argument]:
    fused = problem.fused
    x, name = fused.x_params, fused.weight.target
    assert x is not None, "accepted without activation params"
    zero = packed.zero_point
    args: list[Argument] = [
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
        str(split_epilogue(problem, claim)[0]),
        problem.real,
    ]
    if not claim.output:
        return [*args, float_out(fused)]
    assert fused.out_params is not None, "the claim covers the output"
    return [*args, *output_args(fused.out_params, rw)]
