"""The float form of a quantized product: its cost, its weight, and its ATen calls.

It computes the values that the source defines: a quantized activation is dequantized, and not left
unquantized. Only the weight is dequantized ahead of time, with the bits of the source.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch

from qfuse.cost.sizes import AtPoints, SizeRange, at_points
from qfuse.cost.work import ComputeKind, ProductKind, Work, WorkRange, pointwise_work, without_calls
from qfuse.ir.dtypes import bit_width
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.product import FusedProduct
from qfuse.ir.ops.views import QuantParams, dtype_of
from qfuse.ir.quant.reference import dequantize
from qfuse.lower.operands.matmul import matmul_work
from qfuse.lower.operands.weight_only import COMPUTE_KINDS
from qfuse.lower.problems.convolution import ConvolutionProblem
from qfuse.lower.problems.matmul import MatmulProblem
from qfuse.lower.problems.product import ProductProblem, WeightedProblem
from qfuse.rewrite.prelude import Node, Rewriter

_BYTE = 8


@dataclass(frozen=True, slots=True)
class FloatWeight:
    """A quantized weight that can be dequantized at compile time.

    Attributes:
        stored: The quantized values.
        params: Their parameters; ``tensors`` are the values of its nodes.
        tensors: Scale, zero point and second level of scales.
    """

    stored: torch.Tensor
    params: QuantParams
    tensors: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]

    @property
    def key(self) -> Hashable:
        """Equal for weights that become the same floats."""
        return (id(self.stored), str(self.params.spec), *map(id, self.tensors))

    @property
    def float_bytes(self) -> int:
        """The bytes of the floats."""
        return self.stored.numel() * bit_width(self.params.spec.float_dtype) // _BYTE

    @property
    def quantized_bytes(self) -> int:
        """The bytes of the quantized weight and its parameters, as they are stored."""
        return self.stored.nbytes + sum(t.nbytes for t in self.tensors if t is not None)

    def dequantized(self) -> torch.Tensor:
        """Return the floats, with the bits that the source computes in every call."""
        scale, zero_point, outer = self.tensors
        assert scale is not None, "quantized values have a scale"
        with torch.no_grad():
            return dequantize(self.stored, scale, zero_point, self.params.spec, outer)


def float_weight(problem: ProductProblem) -> FloatWeight | None:
    """Return the quantized weight of ``problem``; ``None`` without one that is constant."""
    if not isinstance(problem, WeightedProblem):
        return None
    stored, params = problem.weight, problem.fused.weight_params
    if stored is None or stored.is_meta or params is None:
        return None
    nodes = (params.scale, params.zero_point, params.outer_scale)
    values = tuple(constant_value(node) for node in nodes)
    # A parameter that is computed at run time.
    if any(node is not None and v is None for node, v in zip(nodes, values, strict=True)):
        return None
    scale, zero_point, outer = values
    return FloatWeight(stored, params, (scale, zero_point, outer))


def float_product_work(problem: ProductProblem) -> WorkRange | None:
    """Return the work of the float product alone; ``None`` in a dtype without a measured speed."""
    kind = COMPUTE_KINDS.get(problem.float_dtype)
    if kind is None:
        return None
    bits = bit_width(problem.float_dtype)
    if isinstance(problem, MatmulProblem):
        return matmul_work(problem, kind, (bits, bits))
    assert isinstance(problem, WeightedProblem), "the products are these"
    # There is no probe of float16, which many CPUs convert element by element.
    if problem.float_dtype is torch.float16:
        return None
    return _weighted_work(problem, kind, bits)


def _weighted_work(problem: WeightedProblem, kind: ComputeKind, bits: int) -> WorkRange:
    convolves = isinstance(problem, ConvolutionProblem)
    weight = problem.fused.weight.meta["val"].numel()

    def build(rows: int, elements: int) -> Work:
        flops = 2.0 * rows * problem.k * problem.n
        return Work(
            flops=flops,
            kind=kind,
            weight_bytes=int(weight) * bits / _BYTE,
            reads=(elements * bits / _BYTE,),
            writes=(rows * problem.n * bits / _BYTE,),
            one_row_flops=flops / max(rows, 1),
            # oneDNN sets up a primitive for a convolution.
            library_calls=int(convolves),
            product=None if convolves else ProductKind.of(kind, bits),
            columns=problem.n,
        )

    return at_points(build, problem.rows, _left(problem))


def float_loops(problem: ProductProblem) -> list[WorkRange]:
    """Return the work of the compiled loops around a float product.

    They dequantize quantized activations, and compute the epilogue and the output quantize.
    """
    fused, bits = problem.fused, bit_width(problem.float_dtype)
    loops = dequantize_loops(problem)
    if fused.epilogue.ops or fused.out_params is not None:
        written = bit_width(dtype_of(fused.node))
        loops.append(without_calls(pointwise_work(problem.outputs, [bits], [written])))
    return loops


def dequantize_loops(problem: ProductProblem) -> list[WorkRange]:
    """Return the work of the compiled loops that dequantize quantized activations."""
    fused, bits = problem.fused, bit_width(problem.float_dtype)
    sizes = [_left(problem)] if fused.x_params is not None else []
    if isinstance(problem, MatmulProblem) and problem.fused.other_params is not None:
        sizes.append(problem.right)
    return [without_calls(pointwise_work(size, [_BYTE], [bits])) for size in sizes]


def dequantize_work(weight: FloatWeight) -> WorkRange:
    """Return the work of the loop that dequantizes a weight in every call."""
    floats = float(weight.float_bytes)
    work = Work(weight_bytes=weight.quantized_bytes, writes=(floats,), kernel_calls=0)
    return AtPoints(work, work, work)


def _left(problem: ProductProblem) -> SizeRange:
    """Return the elements of the activation."""
    if isinstance(problem, MatmulProblem):
        return problem.left
    if isinstance(problem, ConvolutionProblem):
        return problem.elements
    assert isinstance(problem, WeightedProblem), "the products are these"
    return problem.rows * problem.k


def float_call(problem: ProductProblem, weight: torch.Tensor | None, rw: Rewriter) -> Node:
    """Add the call of the op with a float weight, to be expanded.

    Args:
        problem: The product.
        weight: Its dequantized weight; ``None`` keeps the operands as they are.
        rw: Adds the call.
    """
    fused: FusedProduct = problem.fused
    if isinstance(problem, WeightedProblem) and weight is not None:
        name = f"{problem.fused.weight.target}_float"
        fused = replace(problem.fused, weight=rw.constant(weight, name), weight_params=None)
    return rw.call(fused.overload, *fused.call_args())
