"""Packed weights for float activations: checks, packing and cost of weight-only linears."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch.fx.node import Argument

from qfuse.cost.sizes import AtPoints
from qfuse.cost.work import Bits, ComputeKind, Work, linear_work
from qfuse.ir.dtypes import FLOATS, bit_width
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.views import QuantParams
from qfuse.ir.quant.spec import ZeroPointDomain
from qfuse.ir.refusal import Refusal
from qfuse.kernels import KernelLibrary, pack_groups
from qfuse.kernels.weight_only import GROUP_MULTIPLE
from qfuse.lower.operands.checks import (
    COMPUTES,
    check_bias,
    check_platform,
    check_qparams,
    check_scales,
    check_zero_point,
    typed,
)
from qfuse.lower.operands.epilogue import (
    claimed_dtype,
    covered_steps,
    kernel_extras,
    kernel_steps,
    loops_behind,
)
from qfuse.lower.operands.groups import (
    group_count,
    group_offsets,
    group_scales,
    group_zero_points,
    middle_of,
)
from qfuse.lower.operands.packing import Packer, least_code
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.linear import LinearProblem
from qfuse.lower.problems.span import LINEAR, Span
from qfuse.rewrite.prelude import Node, OpOverload, Rewriter
from qfuse.targets.target import Target

COMPUTE_KINDS = {
    torch.float32: ComputeKind.F32,
    torch.bfloat16: ComputeKind.BF16,
    torch.float16: ComputeKind.F32,
}
"""The arithmetic of weight-only kernels, by the dtype of the activation."""


@dataclass(frozen=True, slots=True)
class RealWeight:
    """A packed weight and its quantization parameters, in the layout of the kernels.

    Attributes:
        codes: The packed weight.
        scale: float32 ``[ceil(N / 64), groups, 64]``.
        zero_point: Same shape, in the dtype of the codes; ``None`` if all have the kernels' default
            value.
        offset: Same shape, float32; ``None`` if there are none.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    offset: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class RealWeights:
    """Packs the weights of weight-only linears.

    Attributes:
        packer: Packs and caches codes; shared with other kernels.
    """

    packer: Packer

    def pack(self, problem: LinearProblem, bits: int) -> RealWeight:
        """Pack the weight of ``problem``, which must pass ``check_real_weight``."""
        stored, params = problem.weight, problem.fused.weight_params
        assert stored is not None, "it is a constant"
        assert params is not None, "checked before"
        tensors = (stored, *map(constant_of, params.tensors))
        make = partial(self._packed, stored, params, bits)
        # The spec too: the same numbers with another domain or block are other parameters.
        return self.packer.once(make, tensors, "real", str(params.spec), bits)

    def arguments(
        self, problem: LinearProblem, claim: Claim, bits: int, rw: Rewriter
    ) -> list[Argument]:
        """Emit the constants of a call, and return its arguments."""
        fused = problem.fused
        params, name = fused.weight_params, fused.weight.target
        assert params is not None, "checked before"
        weight, steps = self.pack(problem, bits), kernel_steps(problem, claim)
        return [
            fused.x,
            rw.constant(weight.codes, f"{name}_packed"),
            rw.constant(weight.scale, f"{name}_scales"),
            None if weight.zero_point is None else rw.constant(weight.zero_point, f"{name}_zeros"),
            None if weight.offset is None else rw.constant(weight.offset, f"{name}_offsets"),
            problem.n,
            None if fused.bias is None else typed(fused.bias, torch.float32, rw),
            kernel_extras(steps, rw),
            steps.text,
            params.spec.arithmetic.compute,
            claimed_dtype(problem, claim),
        ]

    def _packed(self, stored: torch.Tensor, params: QuantParams, bits: int) -> RealWeight:
        zero, implied = zero_points_of(stored, params, bits)
        scale = group_scales(params, stored.shape)
        offset = group_offsets(params, stored.shape)
        kept = None if bool((zero == implied).all()) else zero
        return RealWeight(
            self.packer.codes(stored, params.spec, bits),
            pack_groups(scale.t()),
            None if kept is None else pack_groups(kept.t()),
            None if offset is None else pack_groups(offset.t()),
        )


@dataclass(frozen=True, slots=True)
class WeightOnlyLinear(ABC):
    """A linear of float activations with a packed weight, as the op ``qfuse::name``.

    Attributes:
        library: The compiled kernels, or the reason why they are not available.
        weights: Packs weights; shared by all kernels of one lowering.
    """

    covers: ClassVar[tuple[Span, ...]] = (LINEAR,)

    library: KernelLibrary
    weights: RealWeights

    @property
    @abstractmethod
    def name(self) -> str:
        """The name in the report: ``qfuse.`` and the name of the op."""

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits per packed weight."""

    @abstractmethod
    def check(self, problem: LinearProblem) -> Refusal | None:
        """Refuse weights that do not fit the packed format."""

    def supported(self, target: Target) -> Refusal | None:
        """Refuse if the kernels could not be built."""
        return check_platform(self.library, target)

    def accepts(self, problem: LinearProblem) -> Claim | Refusal:
        """Accept float activations, and weights with one scale per group of input features."""
        return check_real_weight(problem) or self.check(problem) or claim_of(problem, self.bits)

    def emit(self, problem: LinearProblem, claim: Claim, rw: Rewriter) -> dict[int, Node]:
        """Emit the call with the packed weight."""
        args = self.weights.arguments(problem, claim, self.bits, rw)
        op: OpOverload = getattr(torch.ops.qfuse, self.name.removeprefix("qfuse.")).default
        return {0: rw.call(op, *args)}


def zero_points_of(
    stored: torch.Tensor, params: QuantParams, bits: int
) -> tuple[torch.Tensor, int]:
    """Return zero points of the packed codes, ``[groups, N]``, and the default without a tensor.

    Zero points that do not fit the dtype of the codes stay int32.
    """
    four = bits == 4  # noqa: PLR2004
    zero = group_zero_points(params, stored.shape) - least_code(stored, params.spec, bits)
    narrow = zero.to(torch.uint8 if four else torch.int8)
    # The narrow ones may have wrapped. Callers refuse
    # int32 zero points by their dtype or their range.
    return (narrow if torch.equal(narrow.to(torch.int32), zero) else zero), 8 if four else 0


def check_real_weight(problem: LinearProblem) -> Refusal | None:
    """Refuse linears that no weight-only kernel supports, whatever the bits of its codes."""
    fused = problem.fused
    params = fused.weight_params
    if fused.x_params is not None:
        return Refusal("the activation is quantized")
    if problem.float_dtype not in COMPUTE_KINDS:
        return Refusal(f"the linear computes in {problem.float_dtype}")
    if params is None:
        return Refusal("the weight is not quantized")
    return (
        check_constant_integers(fused.weight, params)
        or _check_parameters(problem, params)
        or check_bias(problem)
    )


def check_constant_integers(weight: Node, params: QuantParams) -> Refusal | None:
    """Refuse weights of floats, and weights or parameters that are not constants."""
    if params.spec.dtype.is_floating_point:
        return Refusal(f"the weight is stored as {params.spec.dtype}")
    if any(constant_of(part) is None for part in (weight, *params.tensors)):
        return Refusal("the weight or its parameters are computed at run time")
    return None


def _check_parameters(problem: LinearProblem, params: QuantParams) -> Refusal | None:
    groups = group_count(params.spec, problem.k)
    if isinstance(groups, Refusal):
        return groups
    # Only float16 sources: for others, rounding weights to float16 would dominate their noise.
    computes = FLOATS if problem.float_dtype is torch.float16 else COMPUTES
    if params.spec.domain is not ZeroPointDomain.FLOAT_OFFSET:
        refusal = check_qparams(params, "weight", computes) or check_zero_point(params, "weight")
        return refusal or _check_range(problem, params)
    # Offsets count from the middle of the range; kernels subtract
    # it from the codes as an integer. For [-128, 126] it is -0.5.
    if not middle_of(params.spec).is_integer():
        low, high = params.spec.quant_min, params.spec.quant_max
        return Refusal(
            f"the weight's float offsets are relative to a value outside [{low}, {high}]"
        )
    if problem.k % GROUP_MULTIPLE:
        return Refusal(
            f"the weight has float offsets and {problem.k} input features, kernels need "
            f"multiples of {GROUP_MULTIPLE}"
        )
    return check_scales(params, "weight", computes) or _check_range(problem, params)


def _check_range(problem: LinearProblem, params: QuantParams) -> Refusal | None:
    """Refuse weights that may overflow float16, which scaling the sums would avoid."""
    if params.spec.arithmetic.compute is not torch.float16:
        return None
    stored = problem.weight
    assert stored is not None, "it is a constant"
    if stored.numel() == 0:
        return None
    # In float64, in which the bound itself cannot overflow.
    zero = group_zero_points(params, stored.shape).double()
    low, high = map(float, stored.aminmax())
    most = torch.maximum((low - zero).abs(), (high - zero).abs())
    bound = most * group_scales(params, stored.shape).double().abs()
    offset = group_offsets(params, stored.shape)
    if offset is not None:
        bound = bound + offset.double().abs()
    if bool((bound <= torch.finfo(torch.float16).max).all()):
        return None
    return Refusal("the weight may leave the range of float16, which it is dequantized in")


def claim_of(problem: LinearProblem, bits: int) -> Claim:
    """Return the claim of a kernel with ``bits``-bit weights: the epilogue ops that it knows."""
    params = problem.fused.weight_params
    assert params is not None, "checked before"
    groups = group_count(params.spec, problem.k)
    assert isinstance(groups, int), "checked before"
    steps = covered_steps(problem)
    widths = Bits(
        bit_width(problem.float_dtype), bits, bit_width(problem.fused.float_types()[steps])
    )
    work = linear_work(
        problem.rows, problem.k, problem.n, widths, COMPUTE_KINDS[problem.float_dtype]
    )
    zero = 0 if params.zero_point is None else 1
    # A zero point is one byte per group, an offset four, next to a scale of four bytes.
    offset = 4 * (params.spec.domain is ZeroPointDomain.FLOAT_OFFSET)
    parameters = groups * problem.n * (4 + max(zero, offset))
    plan = [_with_parameters(work, parameters), *loops_behind(problem, steps)]
    return Claim(steps, False, plan)


def _with_parameters(work: AtPoints[Work], size: int) -> AtPoints[Work]:
    return AtPoints(*(one.moving(weight_bytes=size) for one in work.values))
