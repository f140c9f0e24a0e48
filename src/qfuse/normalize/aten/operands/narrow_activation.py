"""Store 8-bit activations that are held in wider integers in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.dtypes import BYTES, COMPUTE_DTYPES
from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.constants import is_constant_expression
from qfuse.ir.ops.convolution import CONVOLUTIONS
from qfuse.ir.ops.matmul import MATMULS
from qfuse.ir.ops.value_range import bounds_of
from qfuse.ir.ops.views import dtype_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.normalize.aten.operands.factors import WIDE_INTEGERS
from qfuse.rewrite.pattern.base import is_tensor
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

_PRODUCTS = (aten.linear.default, *CONVOLUTIONS, *MATMULS)
_SHIFT_OR_SCALE = (aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
# Ops that move or scale an activation on its way to a product; the last ones have other names
# before they are normalized.
_BETWEEN = (
    *_SHIFT_OR_SCALE,
    *(aten._to_copy.default, aten.to.dtype, aten.type_as.default, aten.clone.default),
    *(aten.view.default, aten.reshape.default, aten.permute.default, aten.transpose.int),
    *(aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor, aten.t.default),
    *(aten.expand.default, aten.flatten.using_ints, aten.contiguous.default),
    # What takes zeros to zeros.
    *(aten.relu.default, aten.clamp.default, aten.clamp_min.default, aten.cat.default),
    *(aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.constant_pad_nd.default),
    *(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf),
)
# Products that become one of these.
_LIBRARY = (aten.addmm.default, aten.baddbmm.default, aten.einsum.default)
# Bounds the walk down.
_NODES = 32


@dataclass(frozen=True, slots=True)
class WideActivation:
    """A cast, shift or scale of integers that fit in 8 bits.

    Attributes:
        node: The call.
        wide: The integers.
        dtype: The dtype of 8 bits.
    """

    node: Node
    wide: Node
    dtype: torch.dtype


class NarrowActivation(Rule[WideActivation]):
    """``cast(clamp(k, -128, 127))`` of int32 goes through int8, if a product reads it.

    Before::

        round -> clamp(-128, 127) -> cast int32 -> cast float -> mul(s) -> linear

    After::

        round -> clamp(-128, 127) -> cast int8 -> cast int32 -> cast float -> mul(s) -> linear

    The other rules then read a quantize, or a dequantize. A difference or product of the integers
    is alike.

    Exact: the integers fit in 8 bits.

    Refuses: integers that may not fit, and constants; floats that no product reads.
    """

    name = "narrow-activation"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten._to_copy.default, *_SHIFT_OR_SCALE)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> WideActivation | Miss:
        """Match a call that reads wide integers on their way to a product."""
        wide = next(_wide_operands(node), None)
        if wide is None:
            return Miss(MissCode.PATTERN, node, "it reads no wide integers", progress=0)
        bounds = bounds_of(wide)
        for dtype in BYTES:
            info = torch.iinfo(dtype)
            if bounds is not None and info.min <= bounds[0] and bounds[1] <= info.max:
                if is_multiplied(node):
                    return WideActivation(node, wide, dtype)
                return Miss(MissCode.PATTERN, node, "no product reads it", progress=0)
        text = "the {} integers are not known to fit in 8 bits"
        return Miss(MissCode.RANGE, wide, text, dtype_name(dtype_of(wide)), progress=0)

    def rewrite(self, site: WideActivation, rw: Rewriter) -> None:
        """Cast to 8 bits and back; where floats were cast, cast them to 8 bits at once."""
        source = cast_source(site.wide) or site.wide
        narrow = rw.call(aten._to_copy.default, source, dtype=site.dtype)
        wide = rw.call(aten._to_copy.default, narrow, dtype=dtype_of(site.wide))
        op = overload_of(site.node)
        assert op is not None, "the anchor is a call"
        args = [wide if arg is site.wide else arg for arg in site.node.args]
        rw.replace(site.node, rw.call(op, *args, **site.node.kwargs))


def _wide_operands(node: Node) -> Iterator[Node]:
    """Yield the integers of more than 8 bits that ``node`` makes a float of, or shifts."""
    a = arguments(node)
    if dtype_of(node) not in COMPUTE_DTYPES and not is_call(node, aten.sub.Tensor):
        return
    if is_call(node, aten._to_copy.default) and cast_source(node) is None:
        return
    names = ("self", "other") if is_call(node, aten.mul.Tensor) else ("self",)
    for name in names:
        wide = a[name]
        if not is_tensor(wide) or dtype_of(wide) not in WIDE_INTEGERS:
            continue
        source = cast_source(wide)
        narrow = source is not None and dtype_of(source) in BYTES
        if wide in node.args and not narrow and not is_constant_expression(wide):
            yield wide


def is_multiplied(node: Node) -> bool:
    """Whether a product reads ``node``, perhaps moved and scaled."""
    seen: set[Node] = set()
    stack = [node]
    while stack and len(seen) < _NODES:
        for user in stack.pop().users:
            if is_call(user, *_PRODUCTS, *_LIBRARY):
                return True
            if user not in seen and is_call(user, *_BETWEEN):
                seen.add(user)
                stack.append(user)
    return False
