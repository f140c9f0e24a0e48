"""``torchao.(de)quantize_affine_float8_non_decomposed``: both compute in float32, and divide."""

from __future__ import annotations

from typing import ClassVar

import torch

from qfuse.ir.errors import BlockError
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.views import dtype_of, node_of, shape_of
from qfuse.ir.quant.spec import Arithmetic, Block, dtype_name, dtype_range
from qfuse.ir.sizes import Size, element_count, same_size
from qfuse.normalize.importers.errors import cannot_run
from qfuse.normalize.importers.qdq import QdqRule, QdqSite, make_spec
from qfuse.normalize.importers.qparams import fit
from qfuse.normalize.importers.rule import RefusedError, dtype_argument, known_arguments
from qfuse.normalize.importers.torch_ops import Registered
from qfuse.normalize.importers.torchao.choose_float8 import FLOAT8
from qfuse.rewrite.prelude import MissCode, Node, OpOverload

_ARITHMETIC = Arithmetic(torch.float32, reciprocal=False)
_SCALES = (torch.float32, torch.bfloat16, torch.float16)


class NormalizeQuantizeFloat8(QdqRule):
    """``quantize_affine_float8_non_decomposed`` becomes ``qfuse.quantize``.

    Refuses: a scale of another dtype than float32 or narrower; a scale of a lower rank with more
    than one element; sizes that are not known.
    """

    name = "normalize-quantize-float8"
    anchors = Registered("torchao::quantize_affine_float8_non_decomposed")
    op: ClassVar[OpOverload] = ops.quantize

    def read(self, node: Node) -> QdqSite:
        """View a call."""
        a = known_arguments(node, ("tensor", "scale", "float8_dtype"))
        return _site(node, dtype_argument(a["float8_dtype"]), dtype_of(node_of(a["tensor"])))


class NormalizeDequantizeFloat8(QdqRule):
    """``dequantize_affine_float8_non_decomposed`` becomes ``qfuse.dequantize``.

    Refuses: a scale of another dtype than float32 or narrower; a scale of a lower rank with more
    than one element; quantized values that are not float8; sizes that are not known.
    """

    name = "normalize-dequantize-float8"
    anchors = Registered("torchao::dequantize_affine_float8_non_decomposed")
    op: ClassVar[OpOverload] = ops.dequantize

    def read(self, node: Node) -> QdqSite:
        """View a call."""
        a = known_arguments(node, ("tensor", "scale", "output_dtype"))
        return _site(node, dtype_of(node_of(a["tensor"])), dtype_argument(a["output_dtype"]))


def _site(node: Node, stored: torch.dtype, float_dtype: torch.dtype) -> QdqSite:
    a = known_arguments(node, ("tensor", "scale", "float8_dtype", "output_dtype"))
    value, scale = node_of(a["tensor"]), node_of(a["scale"])
    if stored not in FLOAT8 or dtype_of(scale) not in _SCALES:
        text = "it stores {} with a scale of {}"
        names = dtype_name(stored), dtype_name(dtype_of(scale))
        raise RefusedError(MissCode.DTYPE, node, text, *names)
    block = _block(node, value, scale)
    spec = make_spec(node, (stored, dtype_range(stored)), block, float_dtype, _ARITHMETIC)
    return QdqSite(node, value, fit(node, scale, spec.grid(shape_of(value))), None, spec)


def _block(node: Node, value: Node, scale: Node) -> Block:
    """Return the blocks that a scale's shape implies: it is repeated to the shape of the data.

    Raises:
        BlockError: It cannot be repeated to that shape.
        RefusedError: It is aligned in another way, or sizes are not known.
    """
    shape, scales = shape_of(value), shape_of(scale)
    if element_count(scales) == 1 and len(scales) <= len(shape):
        return (None,) * len(shape)
    # torchao compares a shorter shape from the front, and torch then broadcasts it from the back.
    if len(scales) != len(shape):
        text = "a scale of shape {} is aligned with data of shape {} by other rules"
        raise RefusedError(MissCode.SHAPE, node, text, scales, shape)
    return tuple(_axis(node, size, count) for size, count in zip(shape, scales, strict=True))


def _axis(node: Node, size: Size, count: Size) -> int | None:
    if same_size(count, 1):
        return None
    if same_size(count, size):
        return 1
    if not isinstance(size, int) or not isinstance(count, int):
        text = "it is not known before run time whether {} scales tile an axis of {}"
        raise RefusedError(MissCode.SHAPE, node, text, count, size)
    if count == 0 or size % count:
        raise cannot_run(node, f"{count} scales do not tile an axis of {size}", kind=BlockError)
    return size // count
