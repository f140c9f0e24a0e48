"""``quantized_decomposed.(de)quantize_per_channel_group``: groups along the rows of a matrix.

The arithmetic follows torch's type promotion; quantize adds the zero point before it rounds. The
source op also raises on NaN when it quantizes; the canonical op does not.
"""

from __future__ import annotations

from typing import ClassVar

from torch.fx.node import Argument

from qfuse.ir.ops import library as ops
from qfuse.ir.ops.value_range import is_zero
from qfuse.ir.ops.views import dtype_of, node_of, optional_node, shape_of
from qfuse.ir.quant.spec import Arithmetic, Block, QuantSpec, dtype_name
from qfuse.ir.sizes import element_count
from qfuse.normalize.importers.errors import cannot_run
from qfuse.normalize.importers.qdq import (
    QdqRule,
    QdqSite,
    check_clamp,
    check_rounds_nothing,
    check_subtraction,
    check_zero_point_dtype,
    make_spec,
    quant_range,
)
from qfuse.normalize.importers.qparams import check_float, fit, fit_zero_point
from qfuse.normalize.importers.rule import RefusedError, dtype_argument, known_arguments, promoted
from qfuse.normalize.importers.torch_ops import Registered
from qfuse.rewrite.prelude import MissCode, Node, OpOverload

_ARGUMENTS = (
    *("input", "scales", "zero_points", "quant_min", "quant_max", "dtype"),
    "group_size",
)
_MATRIX = 2


class NormalizeQuantizePerGroup(QdqRule):
    """``quantize_per_channel_group`` becomes ``qfuse.quantize`` in blocks of ``1 x group``.

    Refuses: float8, which this op rounds to integers first; a zero point of a wider float dtype;
    bounds that are not exact in the dtype in which it clamps.
    """

    name = "normalize-quantize-per-group"
    anchors = Registered("quantized_decomposed::quantize_per_channel_group")
    op: ClassVar[OpOverload] = ops.quantize

    def read(self, node: Node) -> QdqSite:
        """View a call."""
        a = known_arguments(node, _ARGUMENTS)
        x, scale, zero = node_of(a["input"]), node_of(a["scales"]), node_of(a["zero_points"])
        dtype = dtype_argument(a["dtype"])
        check_rounds_nothing(node, dtype)
        check_float(scale)
        codes = quant_range(node, a["quant_min"], a["quant_max"])
        block = _block(node, x, scale, a["group_size"])
        math = Arithmetic(promoted(node, dtype_of(x), dtype_of(scale)), zero_point_first=True)
        spec = make_spec(node, (dtype, codes), block, dtype_of(x), math)
        check_clamp(node, spec)
        check_zero_point_dtype(zero, math.compute)
        return _site(node, x, scale, zero, spec)


class NormalizeDequantizePerGroup(QdqRule):
    """``dequantize_per_channel_group`` becomes ``qfuse.dequantize`` in blocks of ``1 x group``.

    Refuses: a subtraction that may wrap or round; a dtype argument, which the op ignores, that is
    not the dtype of the quantized values.
    """

    name = "normalize-dequantize-per-group"
    anchors = Registered("quantized_decomposed::dequantize_per_channel_group")
    op: ClassVar[OpOverload] = ops.dequantize

    def read(self, node: Node) -> QdqSite:
        """View a call."""
        a = known_arguments(node, (*_ARGUMENTS, "output_dtype"))
        q, scale, zero = node_of(a["input"]), node_of(a["scales"]), optional_node(a["zero_points"])
        dtype = dtype_argument(a["dtype"])
        if dtype != dtype_of(q):
            text = "its dtype argument is {}, but its input is {}"
            raise RefusedError(
                MissCode.DTYPE, node, text, dtype_name(dtype), dtype_name(dtype_of(q))
            )
        check_float(scale)
        if dtype.is_floating_point:
            raise cannot_run(node, f"it subtracts integers from {dtype_name(dtype)}")
        codes = quant_range(node, a["quant_min"], a["quant_max"])
        block = _block(node, q, scale, a["group_size"])
        math = Arithmetic(dtype_of(scale), zero_point_first=True)
        real = dtype_argument(a["output_dtype"])
        spec = make_spec(node, (dtype, codes), block, real, math)
        check_subtraction(q, zero, math.compute)
        return _site(node, q, scale, zero, spec)


def _block(node: Node, value: Node, scale: Node, group: Argument) -> Block:
    """Return ``(1, group)``, or the whole matrix if one scale is broadcast.

    Raises:
        NormalizeError: The data is not a matrix, or groups do not tile its rows.
        RefusedError: Sizes are not known.
    """
    shape, scales = shape_of(value), shape_of(scale)
    if len(shape) != _MATRIX:
        raise cannot_run(node, f"groups are for matrices, and the data has rank {len(shape)}")
    columns = shape[1]
    if not isinstance(columns, int) or not isinstance(group, int):
        text = "it is not known before run time whether groups of {} tile rows of {}"
        raise RefusedError(MissCode.SHAPE, node, text, group, columns)
    # The source takes a group longer than the row as the row, if each row has one scale.
    if group > columns and scales and scales[-1] == 1:
        group = columns
    if group <= 1 or columns % group:
        raise cannot_run(node, f"groups of {group} do not tile rows of {columns}")
    if element_count(scales) == 1:
        return (None, None)
    return (1, None if group == columns else group)


def _site(
    node: Node, value: Node, scale: Node, zero_point: Node | None, spec: QuantSpec
) -> QdqSite:
    """Return the site; the source flattens both parameters into columns, and broadcasts a 1.

    Raises:
        BlockError: Parameters do not fit.
        RefusedError: Scale and zero point are broadcast differently.
    """
    grid = spec.grid(shape_of(value))
    fitted = fit(node, scale, grid)
    # A single zero means no zero point; several zeros have to fit the grid first.
    if zero_point is None or (is_zero(zero_point) and element_count(shape_of(zero_point)) == 1):
        return QdqSite(node, value, fitted, None, spec)
    counts = element_count(shape_of(scale)), element_count(shape_of(zero_point))
    # One block serves both parameters, so a broadcast 1 cannot stand beside one entry per group.
    if counts[0] != counts[1] and 1 in counts:
        text = "scale and zero point are broadcast differently: {} and {}"
        shapes = shape_of(scale), shape_of(zero_point)
        raise RefusedError(MissCode.SHAPE, node, text, *shapes)
    return QdqSite(node, value, fitted, fit_zero_point(node, zero_point, grid), spec)
