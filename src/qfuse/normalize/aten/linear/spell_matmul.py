"""Products with a summand that no linear has, as a ``matmul`` and a sum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.constants import is_constant_expression
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import dtype_of, node_of, optional_node, shape_of
from qfuse.patterns.quantized_operand import is_scaled_activation, moved_operand
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
# A product of these is not rounded before a factor or a summand is applied.
_WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class SummedProduct:
    """``alpha * (x @ other) + beta * summand``.

    Attributes:
        node: The op.
        x: The left operand.
        other: The right operand; for a linear, its transpose.
        summand: What is added, if anything is.
        alpha: The factor of the product.
        beta: The factor of the summand.
    """

    node: Node
    x: Node
    other: Node
    summand: Node | None
    alpha: float = 1
    beta: float = 1

    @staticmethod
    def of(node: Node) -> SummedProduct | Miss:
        """View a linear, ``addmm`` or ``baddbmm``."""
        a = arguments(node)
        if is_call(node, aten.linear.default):
            x, weight, bias = node_of(a["input"]), node_of(a["weight"]), optional_node(a["bias"])
            return SummedProduct(node, x, weight, bias)
        names = ("mat1", "mat2") if "mat1" in a else ("batch1", "batch2")
        x, other, summand = (node_of(a[name]) for name in (*names, "self"))
        alpha, beta = a["alpha"], a["beta"]
        if not isinstance(alpha, (int, float)) or not isinstance(beta, (int, float)):
            return Miss(MissCode.ARGUMENT, node, "alpha or beta is not a number")
        # With a beta of 0 torch does not look at the summand.
        return SummedProduct(node, x, other, summand if beta else None, alpha, beta)


class SpellMatmul(Rule[SummedProduct]):
    """``baddbmm(y, x, k)`` of two quantized activations becomes ``matmul(x, k) + y``.

    Before::

        q -> dequantize --.
        k -> dequantize --+-> baddbmm(beta, alpha)
        y ----------------.

    After::

        q -> dequantize --.
        k -> dequantize --+-> matmul -> mul(alpha) -> add(y, alpha=beta)

    The same for ``addmm``, and for a ``linear``, whose right operand is transposed. The product is
    then fused with both dequantizes, and factor and summand into its epilogue.

    Applied when all other quantization has been found.

    Rounding: the factor and the summand are applied to the sum instead of within it.

    Refuses: ``alpha`` 0, which torch does not multiply by; infinite and NaN factors; a linear of
    vectors; in 16 bits, a summand, or a factor that is not a power of two: the product would be
    rounded before.
    """

    name = "spell-matmul"
    anchors: ClassVar[tuple[OpOverload, ...]] = (
        aten.linear.default,
        aten.addmm.default,
        aten.baddbmm.default,
    )
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> SummedProduct | Miss:
        """Match a product of two quantized activations with a summand."""
        site = SummedProduct.of(node)
        if isinstance(site, Miss):
            return site
        if not is_scaled_activation(site.x) or not is_scaled_activation(site.other):
            text = "its operands are not two quantized activations"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        return _refuse(site) or site

    def rewrite(self, site: SummedProduct, rw: Rewriter) -> None:
        """Multiply, scale and add."""
        other = site.other
        if is_call(site.node, aten.linear.default):
            other = rw.call(aten.permute.default, other, [1, 0])
        y = rw.call(aten.matmul.default, site.x, other)
        if site.alpha != 1:
            y = rw.call(aten.mul.Tensor, y, site.alpha)
        if site.summand is not None:
            more = {} if site.beta == 1 else {"alpha": site.beta}
            y = rw.call(aten.add.Tensor, y, site.summand, **more)
        rw.replace(site.node, y)


class SpellBatchedSum(SpellMatmul):
    """``baddbmm(y, x, w)`` with a batch of quantized weights becomes ``matmul(x, w) + y``.

    Before::

        x, w -> dequantize --.
        y -------------------+-> baddbmm(beta, alpha)

    After::

        x, w -> dequantize -> matmul -> mul(alpha) -> add(y, alpha=beta)

    The weights of experts and their biases; the product then becomes a batch of linears.

    Rounding: the factor and the summand are applied to the sum instead of within it.

    Refuses: ``alpha`` 0, which torch does not multiply by; infinite and NaN factors; in 16 bits, a
    summand, or a factor that is not a power of two: the product would be rounded before.
    """

    name = "spell-batched-sum"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.baddbmm.default,)

    def match(self, node: Node) -> SummedProduct | Miss:
        """Match a product with a batch of dequantized constants and a summand."""
        site = SummedProduct.of(node)
        if isinstance(site, Miss):
            return site
        made = as_dequantize(moved_operand(site.other)[1])
        if made is None or not is_constant_expression(site.other):
            text = "it multiplies no batch of dequantized weights"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        return _refuse(site) or site


def _refuse(site: SummedProduct) -> Miss | None:
    """Refuse operands and factors with which the product is not multiplied, scaled and added."""
    node = site.node
    shapes = shape_of(site.x), shape_of(site.other)
    if min(map(len, shapes)) < _MATRIX:
        text = "a product of shapes {} and {} has an operand of one axis"
        return Miss(MissCode.SHAPE, node, text, *map(tuple, shapes), progress=2)
    alpha, beta = site.alpha, site.beta
    if alpha == 0 or not math.isfinite(alpha) or not math.isfinite(beta):
        text = "alpha is {}, beta is {}"
        return Miss(MissCode.ARGUMENT, node, text, alpha, beta, progress=2)
    # The mantissa of a power of two.
    exact = site.summand is None and abs(math.frexp(alpha)[0]) == 0.5  # noqa: PLR2004
    if dtype_of(node) not in _WIDE and not exact:
        text = (
            "the product of quantized values would be rounded to {} before {}: "
            "compute it in float32"
        )
        what = "the factor" if site.summand is None else "the sum"
        return Miss(MissCode.ARITHMETIC, node, text, dtype_of(node), what, progress=2)
    return None
