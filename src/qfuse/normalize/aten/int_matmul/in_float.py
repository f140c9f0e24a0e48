"""Turn an integer product that nothing scales into a linear whose float result is exact."""

from __future__ import annotations

import torch

from qfuse.ir.ops.views import dtype_of, shape_of, tensor_of
from qfuse.normalize.aten.int_matmul.activation import ActivationOperand
from qfuse.normalize.aten.int_matmul.products import INT_PRODUCT, IntProduct, as_int_product
from qfuse.normalize.aten.int_matmul.weight import Weight
from qfuse.normalize.aten.linear.weights import call_linear
from qfuse.rewrite.pattern import Capture, Match, PatternRule, guard, let
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rewriter, aten

# Every integer up to here is a float32.
_EXACT = 1 << 24


def _largest(dtype: torch.dtype) -> int:
    info = torch.iinfo(dtype)
    return max(-info.min, info.max)


@guard(MissCode.ARGUMENT, "the zero point is subtracted before the product", at="product")
def _has_no_zero(product: IntProduct) -> bool:
    return product.zero is None


@guard(MissCode.RANGE, "its sums may exceed 2^24, and float32 has not all integers beyond")
def _is_exact(product: IntProduct) -> bool:
    terms = shape_of(product.x)[-1]
    most = _largest(dtype_of(product.x)) * _largest(dtype_of(product.weight))
    return isinstance(terms, int) and terms * most <= _EXACT


@guard(MissCode.PATTERN, "it has a kernel on other devices")
def _is_on_cpu(node: Node) -> bool:
    return tensor_of(node).device.type == "cpu"


PRODUCT = Capture[IntProduct]("product")


def _product(node: Node) -> IntProduct | Miss:
    return as_int_product(node) or Miss(MissCode.PATTERN, node, "it is not a product of integers")


class FuseIntProduct(PatternRule):
    """``mm(int32(x), int32(w))`` becomes ``int32(linear(dequantize(x), dequantize(w)))``.

    Before::

        x int8, w int8 -> cast int32 -> mm

    After::

        x -> qfuse.dequantize(1) --+
        w -> qfuse.dequantize(1) --+-> linear -> cast int32

    Exact: all partial sums are integers that float32 holds. The kernels of quantized linears sum
    integers; the product of 32-bit integers has no fast kernel.

    Refuses: more terms than float32 sums exactly; a product with a zero point; other devices.
    """

    name = "fuse-int-product"
    exactness = Exactness.EXACT
    pattern = INT_PRODUCT.core().given(_is_on_cpu, let(PRODUCT, _product), _has_no_zero, _is_exact)

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Dequantize both factors with the scale 1, multiply, and cast the sums."""
        product = site[PRODUCT]
        x = ActivationOperand(product.x, None, None).build(rw, torch.float32)
        weight = Weight(None, product.weight, rows=product.rows).dequantized(torch.float32)
        y = call_linear(rw, x, weight.build(rw))
        rw.replace(site.node, rw.call(aten._to_copy.default, y, dtype=dtype_of(site.node)))
