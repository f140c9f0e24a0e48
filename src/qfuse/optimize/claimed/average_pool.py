"""Fuse an average of dequantized values, for backends that claim it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.claimed.average_pool import AveragePool, PoolKind, PoolSpec
from qfuse.ir.ops.views import dtype_of, node_of, shape_of
from qfuse.optimize.claimed.site import BetweenSite, with_quantize_behind
from qfuse.optimize.fuse.operands import stored_edge
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

_WINDOWS = (aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
_ADAPTIVE = (
    aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool3d.default,
)
_MEANS = (aten.mean.dim,)


class FuseAveragePool(Rule[BetweenSite]):
    """``quantize(avg_pool2d(dequantize(q)))`` becomes ``qfuse.average_pool(q)``.

    Before::

        q -> dequantize -> avg_pool2d -> quantize

    After::

        q -> qfuse.average_pool

    Likewise ``adaptive_avg_pool`` and means over axes, in one to three dimensions. The result is
    float if it is not quantized, or has other users. It is fused only for a backend that claims
    ``qfuse.average_pool``.

    Refuses: an operand that is not quantized; sizes that are computed at run time; a mean of all
    elements, or of another dtype.
    """

    name = "fuse-average-pool"
    anchors: ClassVar[tuple[OpOverload, ...]] = (*_WINDOWS, *_ADAPTIVE, *_MEANS)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> BetweenSite | Miss:
        """Match an average of a dequantize."""
        x = node_of(arguments(node)["self"])
        stored, params = stored_edge(x)
        if params is None:
            return Miss(MissCode.NOT_QUANTIZED, x, "its operand is not quantized", progress=0)
        if dtype_of(node) != dtype_of(x):
            text = "it averages {} to {}"
            return Miss(MissCode.DTYPE, node, text, dtype_of(x), dtype_of(node), progress=1)
        spec = _spec(node, len(shape_of(x)))
        if spec is None:
            text = "it averages all elements, or sizes are computed at run time"
            return Miss(MissCode.ARGUMENT, node, text, progress=1)
        return with_quantize_behind(AveragePool(node, stored, params, None, spec), node)

    def rewrite(self, site: BetweenSite, rw: Rewriter) -> None:
        """Insert the op."""
        site.insert(rw)


def _spec(node: Node, rank: int) -> PoolSpec | None:
    a = arguments(node)
    if is_call(node, *_MEANS):
        axes = _sizes(a["dim"], 1)
        if not axes:
            return None
        return PoolSpec(PoolKind.MEAN, tuple(axis % rank for axis in axes), keep=bool(a["keepdim"]))
    pools = _ADAPTIVE if is_call(node, *_ADAPTIVE) else _WINDOWS
    axes_of = 1 + next(i for i, op in enumerate(pools) if is_call(node, op))
    if pools is _ADAPTIVE:
        sizes = _sizes(a["output_size"], axes_of)
        return None if not sizes else PoolSpec(PoolKind.ADAPTIVE, sizes)
    found = [_sizes(a[name], axes_of) for name in ("kernel_size", "stride", "padding")]
    kernel, stride, padding = found
    divisor = a.get("divisor_override")
    if kernel is None or stride is None or padding is None:
        return None
    if not kernel or not isinstance(divisor, int | None):
        return None
    flags = bool(a["ceil_mode"]), not a["count_include_pad"]
    return PoolSpec(PoolKind.WINDOWS, kernel, stride, padding, *flags, divisor)


def _sizes(value: object, count: int) -> tuple[int, ...] | None:
    """Return sizes as numbers, one per axis; none if a list is empty."""
    listed = list(value) if isinstance(value, Sequence) else [value]
    if value is None:
        return ()
    numbers = [each for each in listed if isinstance(each, int) and not isinstance(each, bool)]
    if len(numbers) < len(listed):
        return None
    return tuple(numbers * count if len(numbers) == 1 else numbers)
