"""The real numbers of torchao's ``MXTensor.dequantize``, computed op by op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.ops import library as ops
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.spec import QuantSpec
from qfuse.ir.sizes import same_shape, same_size
from qfuse.normalize.importers.torchao_mx.patterns import mx_spec, read_scale
from qfuse.normalize.match.constants import derived
from qfuse.normalize.match.views import sized_view, sizes_argument, view_source
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    arguments,
)

_STORED = (torch.float8_e4m3fn, torch.float8_e5m2)
_REALS = (torch.float32, torch.bfloat16)
_PAIR = 2


@dataclass(frozen=True, slots=True)
class MxDequantizeSite:
    """A product of blocks and their scales.

    Attributes:
        node: The product, a block per row.
        view: The view of the stored numbers as blocks.
        q: The stored numbers.
        scale: Their scales, one axis with as many entries as there are blocks.
        spec: How they are stored.
    """

    node: Node
    view: Node
    q: Node
    scale: Node
    spec: QuantSpec


class NormalizeMxDequantize(Rule[MxDequantizeSite]):
    """Stored numbers times the powers of two of their blocks become a ``qfuse.dequantize``.

    Before::

        q -> cast -> view [-1, 32] --.
        scale -> ... -> 2 ** e ------+-> mul

    After::

        q, scale -> qfuse.dequantize -> view [-1, 32]

    Exact: a number of 8 bits times a power of two is rounded once at most, in either type. Scales
    that are constants, in whatever layout, are put in their order now.

    Refuses: stored numbers that are not ``float8``; scales that are not one per block of a row; a
    real type in which torchao does not compute.
    """

    name = "normalize-mx-dequantize"
    anchors: ClassVar[tuple[OpOverload, ...]] = (torch.ops.aten.mul.Tensor,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> MxDequantizeSite | Miss:
        """Match a product of stored blocks and their scales."""
        a = arguments(node)
        view, scale = a["self"], _scale(a["other"])
        source = view_source(view)
        q = None if source is None else cast_source(source)
        if scale is None or q is None or dtype_of(q) not in _STORED:
            return Miss(MissCode.PATTERN, node, "it scales no stored blocks", progress=0)
        real = dtype_of(node)
        if real not in _REALS or real is not dtype_of(source):  # type: ignore[arg-type]
            return Miss(MissCode.DTYPE, node, "it computes in {}", real, progress=2)
        scale, shape = _least_viewed(scale, len(shape_of(q))), shape_of(q)
        size, blocks = shape_of(node)[-1], shape_of(scale)
        fits = (
            isinstance(size, int)
            and len(blocks) == len(shape)
            and same_shape(blocks[:-1], shape[:-1])
            and same_size(blocks[-1] * size, shape[-1])
            and len(shape_of(node)) == _PAIR
        )
        if not fits or not isinstance(size, int):
            text = "scales {} of stored numbers {} are not one per block of a row"
            return Miss(MissCode.GRANULARITY, node, text, tuple(blocks), tuple(shape), progress=2)
        spec = mx_spec(dtype_of(q), (*(1,) * (len(shape) - 1), size), real)
        assert isinstance(view, torch.fx.Node), "a view has a source"
        return MxDequantizeSite(node, view, q, scale, spec)

    def rewrite(self, site: MxDequantizeSite, rw: Rewriter) -> None:
        """Dequantize rows, and view that as blocks."""
        known = constant_value(site.scale)
        scale = site.scale
        if known is not None:
            scale = derived(rw, site.scale, known.contiguous(), "scale")
        real = rw.call(ops.dequantize, site.q, scale, None, str(site.spec))
        rw.replace(site.node, sized_view(rw, real, sizes_argument(site.view)))


def _scale(value: object) -> Node | None:
    """Return the scale that a column of powers of two is made from."""
    if not isinstance(value, torch.fx.Node):
        return None
    narrow = cast_source(value)
    column = view_source(value if narrow is None else narrow)
    return None if column is None or shape_of(value)[-1] != 1 else read_scale(column)


def _least_viewed(scale: Node, rank: int) -> Node:
    """Return what ``scale`` is a view of and back, so that it is the scale of the quantize."""
    found, source = scale, view_source(scale)
    while source is not None:
        if len(shape_of(source)) == rank and same_shape(shape_of(source), shape_of(scale)):
            found = source
        source = view_source(source)
    return found
