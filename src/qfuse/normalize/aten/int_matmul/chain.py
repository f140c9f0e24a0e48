"""A product of integers that is scaled afterwards is a linear on dequantized operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx.node import Argument

from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.spec import Arithmetic, QuantSpec, dtype_range
from qfuse.normalize.aten.int_matmul.activation_qparams import Activation, place
from qfuse.normalize.aten.int_matmul.match import IntProduct, as_int_product
from qfuse.normalize.aten.linear.weights import call_linear
from qfuse.normalize.aten.qdq.scale_factor import Factor, check_range, constant_factor
from qfuse.normalize.importers.rule import RefusedError, accepted
from qfuse.normalize.match.broadcast import Broadcast, broadcast_of, is_per_feature
from qfuse.normalize.match.constants import shared_constant
from qfuse.normalize.match.views import Path, reapply_views, strip_views
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
class IntMmChainSite:
    """A product of integers and the float product that scales it.

    Attributes:
        node: The float product.
        product: The product of integers.
        path: What stands between the two.
        x: The activation with its part of the scale.
        weight_scale: The weight's part, in the rank of the weight; ``None`` is 1.
        real: Float type of the linear.
    """

    node: Node
    product: IntProduct
    path: Path
    x: Activation
    weight_scale: Factor | None
    real: torch.dtype


class IntMmChain(Rule[IntMmChainSite]):
    """``cast(mm(int32(x), int32(w))) * scale`` becomes ``linear(dequantize(x), dequantize(w))``.

    Before::

        x int8, w int8 -> mm int32 -> cast, view -> mul(scale)

    After::

        x -> qfuse.dequantize(scale) --+
        w -> qfuse.dequantize(1) ------+-> linear -> view, cast

    A scale per row goes to the activation, one per output feature to the weight, one for all to
    the activation, and a product of both kinds to both; what has no scale yet has the scale 1, and
    ``weight-only-scale`` and ``row-scale`` bring in the rest of a chain, in either order. The
    activation is the one that was quantized, of whatever rank, if only views lie between.

    Rounding: the sum is taken over scaled terms in float instead of over integers. A kernel for
    the result sums integers again.

    Refuses: a factor that is neither per row, per output feature, nor for all; a scale per output
    feature that is computed at run time; integers that others read; a cast to float16 before the
    scale, where they overflow.
    """

    name = "int-mm-chain"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.mul.Tensor,)
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> IntMmChainSite | Miss:
        """Match a product of scaled integers and a scale, in either order."""
        a = arguments(node)
        for value, scale in ((a["self"], a["other"]), (a["other"], a["self"])):
            path = strip_views(value)
            product = None if path is None else as_int_product(path.base)
            if path is None or product is None or not dtype_of(node).is_floating_point:
                continue
            assert isinstance(value, Node), "it has a path"
            try:
                return _read(node, product, path, value, scale)
            except RefusedError as refused:
                return refused.miss
        return Miss(MissCode.PATTERN, node, "no factor is a product of integers", progress=0)

    def rewrite(self, site: IntMmChainSite, rw: Rewriter) -> None:
        """Dequantize both operands, and put back what stood between."""
        x = site.x.build(rw, site.real)
        y = call_linear(rw, x, _weight(site, rw))
        for view in site.x.after:
            y = reapply_views(rw, view, y)
        path = site.path.without_views() if site.x.before else site.path
        rw.replace(site.node, path.restore(rw, y, dtype_of(site.node)))


def _read(node: Node, product: IntProduct, path: Path, y: Node, scale: Argument) -> IntMmChainSite:
    if path.shared is not None:
        raise RefusedError(MissCode.SHARED, path.shared, "others read the integers too")
    dtypes = path.dtypes or (dtype_of(node),)
    if torch.float16 in dtypes:
        text = "the integers pass through float16 before they are scaled, where they overflow"
        raise RefusedError(MissCode.DTYPE, node, text)
    real = torch.float64 if dtypes[0] is torch.float64 else torch.float32
    for_x, for_weight = _split(scale, y)
    weight_scale = None if for_weight is None else _per_feature(for_weight)
    _check_ranges(node, weight_scale, for_x, real)
    x = place(product.x, for_x, product.zero, y, path)
    return IntMmChainSite(node, product, path, x, weight_scale, real)


def _check_ranges(
    node: Node, weight_scale: Factor | None, for_x: Argument, real: torch.dtype
) -> None:
    """Check the scales that are known: an infinite one turns stored zeros into NaN.

    Raises:
        RefusedError: Scaled numbers may overflow, or lose their precision.
    """
    spec = QuantSpec(torch.uint8, 0, 255, (None, None), real)
    known = constant_value(for_x) if isinstance(for_x, Node) else None
    if isinstance(for_x, (int, float)):
        known = torch.tensor(float(for_x), dtype=torch.float64)
    for scale in (known, None if weight_scale is None else weight_scale.value):
        if scale is not None:
            accepted(check_range(node, scale, spec, shifted=True))


def _split(scale: Argument, y: Node) -> tuple[Argument, Node | None]:
    """Return the parts of a scale that belong to the activation and to the weight."""
    if not isinstance(scale, Node):
        return scale, None
    if not dtype_of(scale).is_floating_point:
        raise RefusedError(MissCode.DTYPE, scale, "the factor is no float tensor")
    shape = shape_of(y)
    spread = broadcast_of(shape_of(scale), shape)
    if spread in {Broadcast.ROWS, Broadcast.TENSOR}:
        return scale, None
    if spread is Broadcast.CHANNEL and constant_value(scale) is not None:
        return None, scale
    # Both scales may have been multiplied first.
    if is_call(scale, aten.mul.Tensor):
        a = arguments(scale)
        for one, other in ((a["self"], a["other"]), (a["other"], a["self"])):
            if isinstance(other, Node) and is_per_feature(shape_of(other), shape):
                return one, other
    if spread is Broadcast.CHANNEL:
        return None, scale
    text = "a factor of shape {} on a result of shape {} is no scale of either operand"
    raise RefusedError(MissCode.AXIS, scale, text, tuple(shape_of(scale)), tuple(shape))


def _per_feature(scale: Node) -> Factor:
    known = constant_value(scale)
    if known is None:
        text = "the scale of the weight is computed at run time"
        raise RefusedError(MissCode.NOT_CONSTANT, scale, text)
    return constant_factor(scale, known.reshape(-1, 1), 2, "scale")


def _weight(site: IntMmChainSite, rw: Rewriter) -> Node:
    q = site.product.weight_rows(rw)
    dtype = dtype_of(q)
    if site.weight_scale is None:
        scale = shared_constant(rw, q, torch.ones(1, 1), "one_of_rank_2")
        block: tuple[int | None, ...] = (None, None)
    else:
        scale, block = site.weight_scale.build(rw), (1, None)
    spec = QuantSpec(dtype, *dtype_range(dtype), block, site.real, Arithmetic(site.real))
    return rw.call(ops.dequantize, q, scale, None, str(spec))
