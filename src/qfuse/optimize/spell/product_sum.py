"""Spell a sum of products of two quantized activations as a product of matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.constants import is_constant_expression
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import dtype_of, node_of, shape_of, tensor_of
from qfuse.ir.sizes import is_one, is_row_major, same_shape
from qfuse.optimize.match.float_side import refuse_float_side
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


@dataclass(frozen=True, slots=True)
class ProductSumSite:
    """A sum over the last axis of a product.

    Attributes:
        node: The sum.
        rows: The factor with many rows, ``[*batch, N, K]``.
        row: The factor with one row, ``[*batch, 1, K]``.
    """

    node: Node
    rows: Node
    row: Node


class SpellProductSum(Rule[ProductSumSite]):
    """``(dequantize(w) * dequantize(x)[:, None]).sum(-1)`` becomes a ``matmul``.

    Before::

        w [T, N, K] -> dequantize --.
        x [T, 1, K] -> dequantize --+-> mul -> sum(-1)

    After::

        w -> dequantize ---------------.
        x -> dequantize -> transpose --+-> matmul -> squeeze(-1)

    As weights of experts, which are looked up per token, are multiplied by hand. The dequantizes
    are then fused into the product. A library may sum in another order.

    Refuses: a float factor; a constant factor; sums over other axes, or that keep the axis or
    change the type; a product with other users; factors of other shapes.
    """

    name = "spell-product-sum"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.sum.dim_IntList,)
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> ProductSumSite | Miss:
        """Match a sum of a product, one factor of which is dequantized."""
        a = arguments(node)
        product = node_of(a["self"])
        factors = _factors(product)
        if factors is None:
            text = "it does not sum products of a quantized tensor and a row"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        rows, row = factors
        last = len(shape_of(product)) - 1
        axes = a["dim"]
        if not isinstance(axes, (list, tuple)) or list(axes) not in ([-1], [last]) or a["keepdim"]:
            text = "it sums over the axes {}, a product of matrices over the last one"
            return Miss(MissCode.AXIS, node, text, axes, progress=1)
        if dtype_of(node) != dtype_of(product) or dtype_of(rows) != dtype_of(row):
            text = "it multiplies {} and {}, and the sum is {}"
            types = dtype_of(rows), dtype_of(row), dtype_of(node)
            return Miss(MissCode.DTYPE, node, text, *types, progress=1)
        if as_dequantize(row) is None:
            return refuse_float_side("right", row, rows)
        if len(product.users) > 1 or not is_row_major(tensor_of(node)):
            text = "the products have other users, or the sum is not contiguous"
            return Miss(MissCode.SHARED, product, text, progress=2)
        return ProductSumSite(node, rows, row)

    def rewrite(self, site: ProductSumSite, rw: Rewriter) -> None:
        """Multiply by the row as a column."""
        column = rw.call(aten.transpose.int, site.row, -2, -1)
        product = rw.call(aten.matmul.default, site.rows, column)
        rw.replace(site.node, rw.call(aten.squeeze.dim, product, -1))


def _factors(product: Node) -> tuple[Node, Node] | None:
    """Return the dequantized factor with many rows, and the one with one row."""
    if not is_call(product, aten.mul.Tensor):
        return None
    a = arguments(product)
    for rows, row in ((a["self"], a["other"]), (a["other"], a["self"])):
        quantized = as_dequantize(rows)
        if quantized is None or is_constant_expression(quantized.q) or not isinstance(row, Node):
            continue
        many, one = tuple(shape_of(quantized.node)), tuple(shape_of(row))
        matrices = len(many) == len(one) > 1 and same_shape(many, shape_of(product))
        if matrices and is_one(one[-2]) and same_shape(one, (*many[:-2], one[-2], many[-1])):
            return quantized.node, row
    return None
