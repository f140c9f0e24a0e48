"""Products with a quantized weight on the left, as linears between transposes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.cost import size_range
from qfuse.cost.model import CostModel
from qfuse.cost.work import Bits, ComputeKind, linear_work, pointwise_work, without_calls
from qfuse.ir.dtypes import BYTES, bit_width
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import dtype_of, node_of, shape_of, tensor_of
from qfuse.ir.sizes import is_row_major, product, same_shape
from qfuse.normalize.aten.convolution.weight import refuse_cast_weight
from qfuse.normalize.aten.linear.spellings import shared_matrix
from qfuse.normalize.aten.linear.weights import call_linear, is_weight, transposed
from qfuse.normalize.match.quantized_values import STORED, quantized_values
from qfuse.normalize.match.views import transpose_source
from qfuse.patterns.quantized_operand import moved_operand
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    arguments,
    aten,
)

_MATRIX = 2
_KINDS = {torch.float32: ComputeKind.F32, torch.bfloat16: ComputeKind.BF16}


@dataclass(frozen=True, slots=True)
class LeftWeight:
    """A product of a weight and an activation.

    Attributes:
        node: The product.
        weight: The weight, ``[N, K]``.
        matrix: What it is the transpose of, if it is one.
        x: The activation, ``[.., K, M]``.
        bias: A summand ``[N, 1]``.
        copies: Whether the result of the linear has to be copied, for the strides of the product.
    """

    node: Node
    weight: Node
    matrix: Node | None
    x: Node
    bias: Node | None
    copies: bool


class SwapWeight(Rule[LeftWeight]):
    """``w @ x`` with a quantized weight ``w`` becomes ``linear(x.mT, w).mT``.

    Before::

        const w -> dequantize --.
        x [.., K, M] -----------+-> matmul

    After::

        x -> transpose ---------.
        const w -> dequantize --+-> linear -> transpose -> clone

    The copy gives the result the strides that it had. The same for ``mm``, ``matmul`` of a matrix
    or a batch, a ``bmm`` whose batch entries have one weight, and ``addmm`` with one number per
    output. Applied when all weights have been dequantized; one that is only cast, and scaled behind
    the product, is a weight too.

    Rounding: a library may sum in another order.

    Refuses: a weight that is float, or not the same matrix for all batch entries; a vector, which
    needs no transposes; an ``addmm`` with factors or another summand; a result of other strides;
    where the transposes cost more than the smaller weight saves.
    """

    name = "swap-weight"
    anchors: ClassVar[tuple[OpOverload, ...]] = (
        aten.mm.default,
        aten.matmul.default,
        aten.bmm.default,
        aten.addmm.default,
    )
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> LeftWeight | Miss:
        """Match a product whose left factor is a dequantized weight."""
        a = arguments(node)
        left = node_of(a["mat1" if "mat1" in a else "self"])
        x = node_of(a["other" if "other" in a else "mat2"])
        weight = shared_matrix(left) if len(shape_of(left)) >= _MATRIX else None
        matrix = None if weight is None else transpose_source(weight)
        if weight is None or not is_weight(weight) or _stored(matrix or weight) is None:
            text = "its left factor is not a quantized weight"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        # A batch of weights that is expanded has the batch of the activation, or repeats it.
        if len(shape_of(x)) < _MATRIX or not same_shape(
            shape_of(x)[:-_MATRIX], shape_of(node)[:-_MATRIX]
        ):
            text = "a weight of shape {} is multiplied with an activation of shape {}"
            shapes = tuple(shape_of(left)), tuple(shape_of(x))
            return Miss(MissCode.SHAPE, node, text, *shapes, progress=2)
        bias = node_of(a["self"]) if "mat1" in a else None
        wrong = None if bias is None else _refuse_bias(node, bias, weight)
        if wrong is not None:
            return wrong
        value = tensor_of(node)
        copies = is_row_major(value)
        if not copies and not is_row_major(value.mT):
            text = "the result has the strides {}"
            return Miss(MissCode.SHAPE, node, text, value.stride(), progress=2)
        return LeftWeight(node, weight, matrix, x, bias, copies)

    def gain(self, site: LeftWeight, cost: CostModel) -> float | None:
        """Compare the float product with the quantized one and its transposes."""
        kind, stored = _KINDS.get(dtype_of(site.node)), _stored(site.matrix or site.weight)
        if kind is None or stored is None:
            return None
        n, k = shape_of(site.weight)
        rows = size_range(product((*shape_of(site.x)[:-_MATRIX], shape_of(site.x)[-1])))
        float_bits = bit_width(dtype_of(site.node))
        found = as_dequantize(moved_operand(site.x)[1])
        in_bytes = found is not None and dtype_of(found.q) in BYTES
        x_bits = 8 if in_bytes else float_bits
        old = Bits(float_bits, float_bits, float_bits)
        new = Bits(x_bits, stored, float_bits)
        before = [linear_work(rows, int(k), int(n), old, kind)]
        after = [linear_work(rows, int(k), int(n), new, ComputeKind.INT8 if in_bytes else kind)]
        rank = len(shape_of(site.x))
        if transpose_source(site.x, rank) is None:
            count = size_range(product(shape_of(site.x)))
            after.append(without_calls(pointwise_work(count, [x_bits], [x_bits])))
        if site.copies:
            count = size_range(product(shape_of(site.node)))
            after.append(without_calls(pointwise_work(count, [float_bits], [float_bits])))
        # There is no other kernel for a weight on the left, so the usual size decides.
        return cost.compare(before, after).gain

    def rewrite(self, site: LeftWeight, rw: Rewriter) -> None:
        """Transpose, multiply, transpose, and copy."""
        rank = len(shape_of(site.x))
        turned = transpose_source(site.x, rank)
        if turned is None:
            turned = _transposed(rw, site.x)
        bias = None if site.bias is None else rw.call(aten.reshape.default, site.bias, [-1])
        weight = site.weight if site.matrix is None else transposed(rw, site.matrix)
        y = _transposed(rw, call_linear(rw, turned, weight, bias))
        if site.copies:
            y = rw.call(aten.clone.default, y, memory_format=torch.contiguous_format)
        rw.replace(site.node, y)


def _transposed(rw: Rewriter, value: Node) -> Node:
    rank = len(shape_of(value))
    return rw.call(aten.permute.default, value, [*range(rank - 2), rank - 1, rank - 2])


def _stored(weight: Node) -> int | None:
    """Return the bits of a quantized weight; ``None`` if it is float."""
    known = as_dequantize(weight)
    if known is not None:
        return min(bit_width(dtype_of(known.q)), known.params.spec.bits)
    cast = quantized_values(weight)
    if cast is None or cast.q is weight or refuse_cast_weight(weight, cast, STORED) is not None:
        return None
    return bit_width(dtype_of(cast.q))


def _refuse_bias(node: Node, bias: Node, weight: Node) -> Miss | None:
    """Refuse what ``addmm`` adds, unless it is one number per output of the weight."""
    a = arguments(node)
    if (a["alpha"], a["beta"]) != (1, 1):
        text = "alpha is {}, beta is {}"
        return Miss(MissCode.ARGUMENT, node, text, a["alpha"], a["beta"], progress=2)
    if dtype_of(bias) != dtype_of(node) or not same_shape(shape_of(bias), (shape_of(weight)[0], 1)):
        text = "a summand of shape {} is not one number per output of the weight on the left"
        return Miss(MissCode.SHAPE, bias, text, tuple(shape_of(bias)), progress=2)
    return None
