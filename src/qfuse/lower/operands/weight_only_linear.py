"""Weight-only linears: checks, packing and cost."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from qfuse.cost.sizes import AtPoints
from qfuse.cost.work import Bits, Work, linear_work
from qfuse.ir.dtypes import FLOATS, bit_width
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.views import QuantParams
from qfuse.ir.quant.spec import ZeroPointDomain
from qfuse.ir.refusal import Refusal
from qfuse.kernels import pack_groups
from qfuse.kernels.weight_only import GROUP_MULTIPLE
from qfuse.lower.operands.checks import (
    COMPUTES,
    check_scales,
    float_bias,
)
from qfuse.lower.operands.epilogue import (
    covered_ops,
    loops_behind,
)
from qfuse.lower.operands.groups import (
    group_count,
    group_offsets,
    group_scales,
    group_zero_points,
    middle_of,
)
from qfuse.lower.operands.linear_conditions import SCALED_GROUPS
from qfuse.lower.operands.packing import least_value
from qfuse.lower.operands.product_conditions import (
    BIAS,
    weight_of,
    weight_params,
    zero_point_conditions,
)
from qfuse.lower.operands.weight_only import (
    COMPUTE_KINDS,
    WeightOnlyKernel,
    WeightOnlyOperand,
    operand_conditions,
)
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.conditions import Condition, Conditions, hold, on
from qfuse.lower.problems.linear import LinearProblem
from qfuse.lower.problems.span import LINEAR, Span
from qfuse.rewrite.prelude import Node, Rewriter


@dataclass(frozen=True, slots=True)
class WeightOnlyLinear(WeightOnlyKernel):
    """A linear of float activations with a packed weight."""

    covers: ClassVar[tuple[Span, ...]] = (LINEAR,)

    @property
    @abstractmethod
    def requires(self) -> tuple[Condition[LinearProblem], ...]:
        """The conditions on a weight that fits the packed format."""

    def conditions(self, problem: LinearProblem) -> Conditions:
        """Return those on the operands; float offsets have others than integer zero points."""
        params = problem.fused.weight_params
        shifted = params is not None and params.spec.domain is ZeroPointDomain.FLOAT_OFFSET
        known = _OFFSETS if shifted else _INTEGERS
        operands = operand_conditions("linear", self.floats)
        return (*operands, SCALED_GROUPS, *known, _RANGE, BIAS, *self.requires)

    def accepts(self, problem: LinearProblem) -> Claim | Refusal:
        """Accept float activations, and weights with one scale per group of input features."""
        return hold(self.conditions(problem), problem) or claim_of(problem, self.bits)

    def emit(self, problem: LinearProblem, claim: Claim, rw: Rewriter) -> dict[int, Node]:
        """Emit the call with the packed weight."""
        fused, weight = problem.fused, self._pack(problem)
        offset = weight.offset
        args = [
            *self.weight_arguments(problem, weight, rw),
            None if offset is None else rw.constant(offset, f"{fused.weight.target}_offsets"),
            problem.n,
            float_bias(problem, rw),
            *self.epilogue_arguments(problem, claim, rw),
        ]
        return {0: rw.call(self.op(), *args)}

    def _pack(self, problem: LinearProblem) -> WeightOnlyOperand:
        stored, params = problem.weight, problem.fused.weight_params
        assert stored is not None, "it is a constant"
        assert params is not None, "checked before"
        tensors = (stored, *map(constant_of, params.tensors))
        make = partial(self._packed, stored, params)
        # The spec too: the same numbers with another domain or block are other parameters.
        return self.packer.once(make, tensors, "weight-only", str(params.spec), self.bits)

    def _packed(self, stored: torch.Tensor, params: QuantParams) -> WeightOnlyOperand:
        zero, implied = zero_points_of(stored, params, self.bits)
        scale = group_scales(params, stored.shape)
        offset = group_offsets(params, stored.shape)
        kept = None if bool((zero == implied).all()) else zero
        return WeightOnlyOperand(
            self.packer.pack_values(stored, params.spec, self.bits),
            pack_groups(scale.t()),
            None if kept is None else pack_groups(kept.t()),
            None if offset is None else pack_groups(offset.t()),
        )


def zero_points_of(
    stored: torch.Tensor, params: QuantParams, bits: int
) -> tuple[torch.Tensor, int]:
    """Return zero points of the packed values, ``[groups, N]``, and the default without a tensor.

    Zero points that do not fit the dtype of the values stay int32.
    """
    four = bits == 4  # noqa: PLR2004
    zero = group_zero_points(params, stored.shape) - least_value(stored, params.spec, bits)
    narrow = zero.to(torch.uint8 if four else torch.int8)
    # The narrow ones may have wrapped. Callers refuse
    # int32 zero points by their dtype or their range.
    return (narrow if torch.equal(narrow.to(torch.int32), zero) else zero), 8 if four else 0


def _check_scales(problem: LinearProblem) -> Refusal | None:
    # Only float16 sources: for others, rounding weights to float16 would dominate their noise.
    computes = FLOATS if problem.float_dtype is torch.float16 else COMPUTES
    return check_scales(weight_params(problem), "weight", computes)


def _check_middle(problem: LinearProblem) -> Refusal | None:
    spec = weight_params(problem).spec
    # Offsets count from the middle of the range; kernels subtract
    # it from the values as an integer. For [-128, 126] it is -0.5.
    if middle_of(spec).is_integer():
        return None
    low, high = spec.quant_min, spec.quant_max
    return Refusal(f"the weight's float offsets are relative to a value outside [{low}, {high}]")


def _check_lanes(problem: LinearProblem) -> Refusal | None:
    if problem.k % GROUP_MULTIPLE:
        return Refusal(
            f"the weight has float offsets and {problem.k} input features, kernels need "
            f"multiples of {GROUP_MULTIPLE}"
        )
    return None


def _check_range(problem: LinearProblem) -> Refusal | None:
    """Refuse weights that may overflow float16, which scaling the sums would avoid."""
    params = weight_params(problem)
    if params.spec.arithmetic.compute is not torch.float16:
        return None
    stored = weight_of(problem)
    if stored.numel() == 0:
        return None
    # In float64, in which the bound itself cannot overflow.
    zero = group_zero_points(params, stored.shape).double()
    low, high = map(float, stored.double().aminmax())
    most = torch.maximum((low - zero).abs(), (high - zero).abs())
    bound = most * group_scales(params, stored.shape).double().abs()
    offset = group_offsets(params, stored.shape)
    if offset is not None:
        bound = bound + offset.double().abs()
    if bool((bound <= torch.finfo(torch.float16).max).all()):
        return None
    return Refusal("the weight may leave the range of float16, which it is dequantized in")


_INTEGERS: tuple[Condition[LinearProblem], ...] = (
    Condition("kernels know the weight's scales", _check_scales),
    *on(weight_params, zero_point_conditions("weight")),
)
_OFFSETS: tuple[Condition[LinearProblem], ...] = (
    Condition("the middle of the weight's range is an integer", _check_middle),
    Condition("the input features fill the lanes of float offsets", _check_lanes),
    Condition("kernels know the weight's scales", _check_scales),
)
_RANGE: Condition[LinearProblem] = Condition(
    "the weight stays in the range of float16", _check_range
)


def claim_of(problem: LinearProblem, bits: int) -> Claim:
    """Return the claim of a kernel with ``bits``-bit weights: the epilogue ops that it knows."""
    params = problem.fused.weight_params
    assert params is not None, "checked before"
    groups = group_count(params.spec, problem.k)
    assert isinstance(groups, int), "checked before"
    steps = covered_ops(problem)
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
