"""The float values of torchao's ``MXTensor.dequantize``, in exported ATen ops."""

from __future__ import annotations

import torch

from qfuse.ir.ops import library as ops
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.spec import QuantSpec
from qfuse.ir.sizes import same_shape, same_size
from qfuse.normalize.importers.torchao_mx.patterns import mx_spec, power_of_scale
from qfuse.normalize.match.constants import derived
from qfuse.normalize.match.views import VIEW, sized_view, sizes_argument, view_source
from qfuse.rewrite.pattern import Capture, Match, Maybe, PatternRule, V, Via, cast, guard, let
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rewriter

_STORED = (torch.float8_e4m3fn, torch.float8_e5m2)
_REALS = (torch.float32, torch.bfloat16)
_PAIR = 2

_Q = V("q", _STORED)
_BLOCKS = V("blocks")
_ROWS: Capture[Node] = Capture("rows")
_SPEC: Capture[QuantSpec] = Capture("spec")
_COLUMN = Via(power_of_scale(), VIEW)


@guard(MissCode.PATTERN, "the scales are not a column")
def _is_column(column: Node) -> bool:
    return shape_of(column)[-1] == 1


@guard(MissCode.DTYPE, "it computes in {node.dtype}")
def _has_one_type(node: Node, blocks: Node) -> bool:
    return dtype_of(node) in _REALS and dtype_of(node) is dtype_of(blocks)


def _row_scales(scale: Node, q: Node) -> Node:
    """Return the scale of the quantize, if ``scale`` only views it and views it back."""
    found, source, rank = scale, view_source(scale), len(shape_of(q))
    while source is not None:
        if len(shape_of(source)) == rank and same_shape(shape_of(source), shape_of(scale)):
            found = source
        source = view_source(source)
    return found


def _spec_of(node: Node, q: Node, rows: Node) -> QuantSpec | Miss:
    shape, blocks, size = shape_of(q), shape_of(rows), shape_of(node)[-1]
    fits = (
        isinstance(size, int)
        and len(blocks) == len(shape)
        and same_shape(blocks[:-1], shape[:-1])
        and same_size(blocks[-1] * size, shape[-1])
        and len(shape_of(node)) == _PAIR
    )
    if not fits or not isinstance(size, int):
        text = "scales {} of quantized values {} are not one per block of a row"
        return Miss(MissCode.GRANULARITY, node, text, tuple(blocks), tuple(shape))
    return mx_spec(dtype_of(q), (*(1,) * (len(shape) - 1), size), dtype_of(node))


class NormalizeMxDequantize(PatternRule):
    """Quantized values times the powers of two of their blocks become a ``qfuse.dequantize``.

    Before::

        q -> cast -> view [-1, 32] --.
        scale -> ... -> 2 ** e ------+-> mul

    After::

        q, scale -> qfuse.dequantize -> view [-1, 32]

    Exact: an 8-bit value times a power of two is rounded once at most, in either dtype. Constant
    scales, in whatever layout, are reordered at compile time.

    Refuses: quantized values that are not ``float8``; scales that are not one per block of a row; a
    float dtype in which torchao does not compute.
    """

    name = "normalize-mx-dequantize"
    exactness = Exactness.EXACT
    pattern = (
        Via(cast(_Q).named("wide"), VIEW).named("blocks")
        * Maybe(cast(_COLUMN), _COLUMN).named("column").core()
    ).given(
        _is_column,
        _has_one_type,
        let(_ROWS, _row_scales),
        let(_SPEC, _spec_of),
    )

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Dequantize rows, and view the result as blocks."""
        scale = site[_ROWS]
        # Constant scales may be swizzled by permutes; their value is in the order of the rows.
        known = constant_value(scale)
        if known is not None:
            scale = derived(rw, scale, known.contiguous(), "scale")
        real = rw.call(ops.dequantize, site[_Q], scale, None, str(site[_SPEC]))
        rw.replace(site.node, sized_view(rw, real, sizes_argument(site[_BLOCKS])))
