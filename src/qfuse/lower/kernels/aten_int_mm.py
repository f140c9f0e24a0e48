"""``aten._int_mm`` followed by scales and bias: for machines without a C++ compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.cost.sizes import AtPoints, SizeRange, at_points
from qfuse.cost.work import (
    Bits,
    ComputeKind,
    ProductKind,
    Work,
    WorkRange,
    linear_work,
    pointwise_work,
    without_calls,
)
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.epilogue import Act
from qfuse.ir.ops.views import QuantParams, shape_of
from qfuse.ir.refusal import Refusal
from qfuse.lower.operands.checks import (
    rows_of,
    scale_node,
    scale_vector,
    typed,
)
from qfuse.lower.operands.linear_conditions import SCALED_CHANNELS, SCALED_ROWS
from qfuse.lower.operands.packing import Packer
from qfuse.lower.operands.product_conditions import (
    ACTIVATION_QUANTIZED,
    BIAS,
    WEIGHT_QUANTIZED,
    scale_conditions,
    weight_params,
    x_params,
)
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.conditions import Condition, Conditions, hold, on
from qfuse.lower.problems.linear import LinearProblem
from qfuse.lower.problems.span import LINEAR, Span
from qfuse.rewrite.prelude import Node, Rewriter, aten
from qfuse.targets.target import Target

_OP = "aten::_int_mm"
INT_MM = "aten._int_mm"
_LEAST = 2
# What a core multiplies and adds in float32 while a compiled loop computes an activation with an
# exponential or an error function: gelu was measured at 200 with AVX2.
_EXPONENTIAL_FLOPS = 100.0
_CHEAP = frozenset({"relu", "hardtanh", "hardswish", "hardsigmoid", "leaky_relu", "squared_relu"})
# The product of two int8 values is at most 2^14, and the accumulator is int32.
_MOST_K = (1 << 17) - 1


def int_mm_refusal(target: Target) -> Refusal | None:
    """Refuse targets where ``aten._int_mm`` is missing or saturates."""
    if not target.has_kernel(_OP):
        return Refusal("torch has no such kernel here")
    return None if target.has_exact_onednn else Refusal("without VNNI its partial sums saturate")


@dataclass(frozen=True, slots=True)
class IntMM:
    """``aten._int_mm`` for symmetric int8 activations and weights.

    It is accepted only if no size can be 1: with one row, oneDNN uses the arbitrary row stride of
    the tensor and leaves its output uninitialized. Without VNNI, its 16-bit intermediate sums
    saturate.

    Attributes:
        packer: Packs weights; shared by all kernels of one lowering.
    """

    covers: ClassVar[tuple[Span, ...]] = (LINEAR,)

    packer: Packer
    name: str = INT_MM

    def supported(self, target: Target) -> Refusal | None:
        """Refuse targets where the op is missing or saturates."""
        return int_mm_refusal(target)

    def conditions(self, problem: LinearProblem) -> Conditions:
        """Return those on the sizes and on both operands."""
        del problem
        return _CONDITIONS

    def accepts(self, problem: LinearProblem) -> Claim | Refusal:
        """Accept symmetric int8 activations and weights of at least two rows."""
        refusal = hold(_CONDITIONS, problem)
        if refusal is not None:
            return refusal
        work = int_mm_work(problem.rows, problem.k, problem.n)
        return Claim(0, False, [*work, *_activations(problem)])

    def emit(self, problem: LinearProblem, claim: Claim, rw: Rewriter) -> dict[int, Node]:
        """Emit the matmul, scales, bias and the cast to the linear's dtype."""
        del claim
        fused = problem.fused
        assert fused.x_params is not None, "accepted without activation params"
        assert fused.weight_params is not None, "accepted without weight params"
        lead = [*rw.sizes(fused.x, len(shape_of(fused.x)) - 1), problem.n]
        flat = rows_of(fused.x, problem.k, rw)
        weight = self.packer.contiguous(fused.weight, rw)
        sums = rw.call(aten._int_mm.default, flat, rw.call(aten.t.default, weight))
        y = rw.call(aten._to_copy.default, sums, dtype=torch.float32)
        y = rw.call(aten.reshape.default, y, lead)
        y = rw.call(aten.mul.Tensor, y, scale_node(fused.x_params, rw))
        scale = scale_vector(fused.weight_params, torch.float32, problem.n, rw)
        y = rw.call(aten.mul.Tensor, y, scale)
        if fused.bias is not None:
            y = rw.call(aten.add.Tensor, y, typed(fused.bias, torch.float32, rw))
        if problem.float_dtype is torch.float32:
            return {0: y}
        return {0: rw.call(aten._to_copy.default, y, dtype=problem.float_dtype)}


def _check_sizes(problem: LinearProblem) -> Refusal | None:
    if not fits_int_mm(problem.rows, min(problem.k, _MOST_K), problem.n):
        return Refusal("it returns garbage when a size is 1")
    return None


def _check_depth(problem: LinearProblem) -> Refusal | None:
    if problem.k > _MOST_K:
        return Refusal(f"{problem.k} input features could overflow its sums")
    return None


def _symmetric(name: str) -> tuple[Condition[QuantParams], ...]:
    """Return the conditions of int8 values without a zero point."""
    return (
        Condition(f"the {name} is stored as int8", lambda one: _check_stored(one, name)),
        Condition(f"the {name} has no zero point", lambda one: _check_zero(one, name)),
    )


def _check_stored(params: QuantParams, name: str) -> Refusal | None:
    # `aten._int_mm` takes int8 only.
    if params.spec.dtype is not torch.int8:
        return Refusal(f"the {name} is stored as {params.spec.dtype}")
    return None


def _check_zero(params: QuantParams, name: str) -> Refusal | None:
    zero = None if params.zero_point is None else constant_of(params.zero_point)
    if params.zero_point is not None and (zero is None or bool(zero.any())):
        return Refusal(f"the {name} has a zero point")
    return None


def _check_constant(params: QuantParams) -> Refusal | None:
    # The scale of the weight is expanded to a vector at compile time.
    if constant_of(params.scale) is None:
        return Refusal("the weight's scale is computed at run time")
    return None


_WEIGHT: tuple[Condition[QuantParams], ...] = (
    *_symmetric("weight"),
    Condition("the weight's scale is a constant", _check_constant),
    *scale_conditions("weight"),
)

_CONDITIONS: tuple[Condition[LinearProblem], ...] = (
    ACTIVATION_QUANTIZED,
    WEIGHT_QUANTIZED,
    SCALED_CHANNELS,
    Condition("no size can be 1", _check_sizes),
    Condition("no sum of products can overflow", _check_depth),
    *on(x_params, (*_symmetric("activation"), *scale_conditions("activation"))),
    *on(weight_params, _WEIGHT),
    SCALED_ROWS,
    BIAS,
)


def int_mm_work(rows: SizeRange, k: int, n: int) -> list[WorkRange]:
    """Return the work of the matmul and of a compiled loop over its sums.

    The matmul counts as a call, since oneDNN sets up a primitive every time.
    """
    bits, kind = Bits(8, 8, 32), ComputeKind.INT8
    product = linear_work(rows, k, n, bits, kind, ProductKind.ATEN_INT8)
    called = AtPoints(*(work.with_calls(1, 1) for work in product.values))
    return [called, without_calls(pointwise_work(rows * n, [32], [32]))]


def _activations(problem: LinearProblem) -> list[WorkRange]:
    """Return what the compiled loop computes for activations of the epilogue."""
    names = [step.name for step in problem.fused.epilogue.ops if isinstance(step, Act)]
    flops = _EXPONENTIAL_FLOPS * sum(name not in _CHEAP for name in names)
    work = at_points(lambda count: Work(flops * count, ComputeKind.F32), problem.outputs)
    return [without_calls(work)] if flops else []


def fits_int_mm(rows: SizeRange, k: int, n: int) -> bool:
    """Whether the op takes a product of these sizes."""
    # The least number of rows that the graph declares:
    # one token of a dynamic length is one row.
    return min(rows.low, n, k) >= _LEAST and k <= _MOST_K
