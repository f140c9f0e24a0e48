"""``aten._scaled_mm``: a product of two float8 matrices with their scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import FLOATS
from qfuse.ir.ops.constants import is_constant_expression
from qfuse.ir.ops.views import dtype_of, node_of, optional_node, shape_of
from qfuse.ir.quant.spec import Arithmetic, Block, dtype_range
from qfuse.ir.sizes import Size, element_count, same_shape
from qfuse.normalize.aten.linear.weights import call_linear, transposed
from qfuse.normalize.importers.library.encoding import (
    Encoding,
    ProductRule,
    check_dtype,
    check_feature_bias,
)
from qfuse.normalize.importers.qdq import make_spec
from qfuse.normalize.importers.qparams import fit
from qfuse.normalize.importers.rule import RefusedError, dtype_argument, known_arguments
from qfuse.rewrite.prelude import MissCode, Node, OpOverload, Rewriter, aten

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_KNOWN = (
    "self",
    "mat2",
    "scale_a",
    "scale_b",
    "bias",
    "scale_result",
    "out_dtype",
    "use_fast_accum",
)


@dataclass(frozen=True, slots=True)
class ScaledSite:
    """A product of two quantized matrices.

    Attributes:
        node: The library's product.
        x: The left factor, ``[M, K]``.
        weight: The right factor, ``[K, N]``.
        bias: One number per output feature.
    """

    node: Node
    x: Encoding
    weight: Encoding
    bias: Node | None


@dataclass(frozen=True, slots=True)
class ScaledOperands:
    """The operands of a product of two float8 matrices, and the argument that is its dtype."""

    x: Node
    weight: Node
    x_scale: Node
    weight_scale: Node
    bias: Argument
    out_dtype: Argument


class NormalizeScaledMm(ProductRule[ScaledSite]):
    """``_scaled_mm(x, weight, scale_x, scale_weight, bias)`` becomes a float32 linear and a cast.

    Refuses: a factor other than float8; a right factor that is not a constant; scales other than
    one for the tensor, or one per row of the left and per column of the right factor; a result that
    is not a float type to compute in.
    """

    name = "normalize-scaled-mm"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten._scaled_mm.default,)

    def read(self, node: Node) -> ScaledSite:
        """View a call."""
        a = known_arguments(node, _KNOWN)
        factors = node_of(a["self"]), node_of(a["mat2"])
        scales = node_of(a["scale_a"]), node_of(a["scale_b"])
        return read_scaled(node, ScaledOperands(*factors, *scales, a["bias"], a["out_dtype"]))

    def rewrite(self, site: ScaledSite, rw: Rewriter) -> None:
        """Add two dequantizes, the linear, and the cast of its result."""
        name = site.node.name
        x = site.x.dequantize(rw, f"{name}_left")
        weight = transposed(rw, site.weight.dequantize(rw, f"{name}_right"))
        bias = site.bias
        if bias is not None and dtype_of(bias) is not torch.float32:
            bias = rw.call(aten._to_copy.default, bias, dtype=torch.float32)
        y = call_linear(rw, x, weight, bias)
        if dtype_of(site.node) is not torch.float32:
            y = rw.call(aten._to_copy.default, y, dtype=dtype_of(site.node))
        rw.replace(site.node, y)


def read_scaled(node: Node, given: ScaledOperands) -> ScaledSite:
    """View a call with these operands.

    Raises:
        RefusedError: See :class:`NormalizeScaledMm`.
    """
    x, weight = given.x, given.weight
    check_dtype(node, "left factor", dtype_of(x), _FLOAT8)
    check_dtype(node, "right factor", dtype_of(weight), _FLOAT8)
    check_dtype(node, "result", dtype_argument(given.out_dtype, dtype_of(x)), FLOATS)
    if not is_constant_expression(weight):
        raise RefusedError(MissCode.NOT_CONSTANT, weight, "its right factor is not a constant")
    bias = optional_node(given.bias)
    check_feature_bias(node, bias, shape_of(weight)[1])
    left = _encoding(node, x, given.x_scale, 0)
    right = _encoding(node, weight, given.weight_scale, 1)
    return ScaledSite(node, left, right, bias)


def _encoding(node: Node, q: Node, scale: Node, axis: int) -> Encoding:
    """Return how a factor is quantized: for the tensor, or one scale per index of ``axis``."""
    check_dtype(node, "scale", dtype_of(scale), (torch.float32,))
    shape = shape_of(q)
    rows: list[Size] = [1, 1]
    rows[axis] = shape[axis]
    block: Block
    if element_count(shape_of(scale)) == 1:
        block = (None, None)
    elif same_shape(shape_of(scale), rows):
        block = (1, None) if axis == 0 else (None, 1)
    else:
        text = "a scale of shape {} for a factor of shape {}"
        raise RefusedError(MissCode.SHAPE, node, text, tuple(shape_of(scale)), tuple(shape))
    stored = dtype_of(q), dtype_range(dtype_of(q))
    spec = make_spec(node, stored, block, torch.float32, Arithmetic(torch.float32))
    return Encoding(q, fit(node, scale, spec.grid(shape)), None, spec)
