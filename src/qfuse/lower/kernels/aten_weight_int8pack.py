"""torch's own int8 weight-only linear: fast for few rows, slow for many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.cost.sizes import AtPoints
from qfuse.cost.work import Bits, ComputeKind, ProductKind, Work, linear_work
from qfuse.ir.dtypes import FLOATS, bit_width
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.views import shape_of
from qfuse.ir.refusal import Refusal
from qfuse.lower.operands.checks import (
    rows_of,
    scale_vector,
)
from qfuse.lower.operands.linear_conditions import SCALED_CHANNELS
from qfuse.lower.operands.packing import Packer
from qfuse.lower.operands.product_conditions import (
    BIAS,
    WEIGHT_QUANTIZED,
    scale_conditions,
    weight_params,
)
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.conditions import Condition, Conditions, hold, on
from qfuse.lower.problems.linear import LinearProblem
from qfuse.lower.problems.span import LINEAR, Span
from qfuse.rewrite.prelude import Node, Rewriter, aten
from qfuse.targets.target import Target

_OP = "aten::_weight_int8pack_mm"
# The bfloat16 loop has no tail: the last partial block reads beyond the end of a row.
_BFLOAT16_BLOCK = 16


@dataclass(frozen=True, slots=True)
class WeightInt8Pack:
    """``aten._weight_int8pack_mm`` for float activations and per-channel int8 weights.

    Attributes:
        packer: Packs weights; shared by all kernels of one lowering.
    """

    covers: ClassVar[tuple[Span, ...]] = (LINEAR,)

    packer: Packer
    name: str = "aten._weight_int8pack_mm"

    def supported(self, target: Target) -> Refusal | None:
        """Refuse targets for which torch lacks the kernel."""
        return None if target.has_kernel(_OP) else Refusal("torch has no such kernel here")

    def conditions(self, problem: LinearProblem) -> Conditions:
        """Return those on the activation and the weight."""
        del problem
        return _CONDITIONS

    def accepts(self, problem: LinearProblem) -> Claim | Refusal:
        """Accept symmetric int8 weights with one scale per output feature."""
        return hold(_CONDITIONS, problem) or Claim(0, False, _work(problem))

    def emit(self, problem: LinearProblem, claim: Claim, rw: Rewriter) -> dict[int, Node]:
        """Emit the 2-D matmul, followed by the bias."""
        del claim
        fused = problem.fused
        params = fused.weight_params
        assert params is not None, "accepted without weight params"
        shape = shape_of(fused.x)
        scale = scale_vector(params, problem.float_dtype, problem.n, rw)
        flat = rows_of(fused.x, problem.k, rw)
        weight = self.packer.contiguous(fused.weight, rw)
        y = rw.call(aten._weight_int8pack_mm.default, flat, weight, scale)
        y = rw.call(aten.reshape.default, y, [*rw.sizes(fused.x, len(shape) - 1), problem.n])
        return {0: y if fused.bias is None else rw.call(aten.add.Tensor, y, fused.bias)}


def _check_float(problem: LinearProblem) -> Refusal | None:
    return None if problem.fused.x_params is None else Refusal("the activation is quantized")


def _check_computed(problem: LinearProblem) -> Refusal | None:
    if problem.float_dtype in FLOATS:
        return None
    return Refusal(f"the linear computes in {problem.float_dtype}")


def _check_features(problem: LinearProblem) -> Refusal | None:
    if problem.k == 0:
        return Refusal("the linear has no input features")
    # An axis of one element may have any stride, also in a contiguous tensor, and the op raises if
    # it is not 1.
    if problem.k == 1:
        return Refusal("the linear has one input feature, whose stride need not be 1")
    return None


def _check_blocks(problem: LinearProblem) -> Refusal | None:
    if problem.float_dtype is torch.bfloat16 and problem.k % _BFLOAT16_BLOCK:
        what = f"not a multiple of {_BFLOAT16_BLOCK}, and in bfloat16"
        return Refusal(f"{problem.k} input features are {what} it reads beyond the end of a row")
    return None


def _check_stored(problem: LinearProblem) -> Refusal | None:
    stored = weight_params(problem).spec.dtype
    return None if stored is torch.int8 else Refusal(f"the weight is stored as {stored}")


def _check_constant(problem: LinearProblem) -> Refusal | None:
    if constant_of(weight_params(problem).scale) is None:
        return Refusal("the weight's scale is computed at run time")
    return None


def _check_rounding(problem: LinearProblem) -> Refusal | None:
    scale = constant_of(weight_params(problem).scale)
    assert scale is not None, "checked before"
    # The op has scales of the dtype of the activation. In bfloat16, 0.0123 becomes 0.01233, and all
    # values of its row are 0.2 % larger.
    if not torch.equal(scale.to(problem.float_dtype).to(scale.dtype), scale):
        return Refusal(f"it needs scales in {problem.float_dtype}, which would round these")
    return None


def _check_zero_point(problem: LinearProblem) -> Refusal | None:
    params = weight_params(problem)
    zero = None if params.zero_point is None else constant_of(params.zero_point)
    if params.zero_point is not None and (zero is None or bool(zero.any())):
        return Refusal("the weight has a zero point")
    return None


_CONDITIONS: tuple[Condition[LinearProblem], ...] = (
    Condition("the activation is not quantized", _check_float),
    Condition("the linear computes in a float dtype of at most 32 bits", _check_computed),
    Condition("the linear has several input features", _check_features),
    Condition("it reads no features beyond the end of a row", _check_blocks),
    WEIGHT_QUANTIZED,
    SCALED_CHANNELS,
    Condition("the weight is stored as int8", _check_stored),
    *on(weight_params, scale_conditions("weight")),
    Condition("the weight's scale is a constant", _check_constant),
    Condition("the scales are exact in the dtype of the activation", _check_rounding),
    Condition("the weight has no zero point", _check_zero_point),
    BIAS,
)


def _work(problem: LinearProblem) -> AtPoints[Work]:
    size = bit_width(problem.float_dtype)
    f32 = problem.float_dtype is torch.float32
    product = ProductKind.ATEN_F32_INT8 if f32 else ProductKind.ATEN_BF16_INT8
    bits, kind = Bits(size, 8, size), ComputeKind.F32
    return linear_work(problem.rows, problem.k, problem.n, bits, kind, product)
