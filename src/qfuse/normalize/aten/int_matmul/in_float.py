"""Turn an integer product that nothing scales into a linear whose float result is exact."""

from __future__ import annotations

import torch

from qfuse.ir.ops.constants import number_of
from qfuse.ir.ops.views import dtype_of, shape_of, tensor_of
from qfuse.ir.quant.spec import dtype_range
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


@guard(
    MissCode.ZERO_POINT,
    "the zero point that is subtracted before the product is not one known integer of the "
    "activation's range",
    at="product",
)
def _has_known_zero(product: IntProduct) -> bool:
    known = _zero(product)
    low, high = dtype_range(dtype_of(product.x))
    return isinstance(known, int) and low <= known <= high


def _zero(product: IntProduct) -> int | float | None:
    return 0 if product.zero is None else number_of(product.zero)


@guard(MissCode.RANGE, "its sums may exceed 2^24, and float32 has not all integers beyond")
def _is_exact(product: IntProduct) -> bool:
    terms = shape_of(product.x)[-1]
    shift = _zero(product)
    assert shift is not None, "the guard before this one has seen it"
    low, high = dtype_range(dtype_of(product.x))
    most = int(max(shift - low, high - shift)) * _largest(dtype_of(product.weight))
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

    A known zero point that is subtracted from ``x`` becomes that of its dequantize.

    Refuses: more terms than float32 sums exactly; a zero point that is not one known integer of the
    range of ``x``; other devices.
    """

    name = "fuse-int-product"
    exactness = Exactness.EXACT
    pattern = INT_PRODUCT.core().given(
        _is_on_cpu, let(PRODUCT, _product), _has_known_zero, _is_exact
    )

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Dequantize both factors with the scale 1, multiply, and cast the sums."""
        product = site[PRODUCT]
        zero = _zero(product)
        x = ActivationOperand(product.x, None, zero or None).build(rw, torch.float32)
        weight = Weight(None, product.weight, rows=product.rows).dequantized(torch.float32)
        y = call_linear(rw, x, weight.build(rw))
        rw.replace(site.node, rw.call(aten._to_copy.default, y, dtype=dtype_of(site.node)))
