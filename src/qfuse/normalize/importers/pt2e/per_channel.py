"""``quantized_decomposed.(de)quantize_per_channel``.

Quantize computes in float32 or in the scale's dtype, whichever is wider: with a float64 scale it
computes in float64. Dequantize subtracts the zero point from the stored integers, and multiplies
in the scale's dtype.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.fx.node import Argument

from qfuse.ir.errors import BlockError
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.views import dtype_of, node_of, optional_node, shape_of
from qfuse.ir.quant.spec import Arithmetic, Block, dtype_name
from qfuse.ir.sizes import element_count, same_size
from qfuse.normalize.importers.errors import cannot_run
from qfuse.normalize.importers.pt2e.per_tensor import check_readable
from qfuse.normalize.importers.qdq import (
    QdqRule,
    QdqSite,
    check_clamp,
    check_operand_dtype,
    check_quant_range,
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

_ARGUMENTS = ("input", "scales", "zero_points", "axis", "quant_min", "quant_max", "dtype")


class NormalizeQuantizePerChannel(QdqRule):
    """``quantize_per_channel`` becomes ``qfuse.quantize`` with one scale per channel.

    Refuses: float8, which this op rounds to integers first; a zero point of a wider float dtype
    than the scale; bounds that are not exact in the dtype in which it clamps.
    """

    name = "normalize-quantize-per-channel"
    anchors = Registered("quantized_decomposed::quantize_per_channel")
    op: ClassVar[OpOverload] = ops.quantize

    def read(self, node: Node) -> QdqSite:
        """View a call."""
        a = known_arguments(node, _ARGUMENTS)
        x, scale, zero = node_of(a["input"]), node_of(a["scales"]), node_of(a["zero_points"])
        dtype = dtype_argument(a["dtype"])
        check_readable(node, x)
        check_rounds_nothing(node, dtype)
        check_float(scale)
        codes = quant_range(node, a["quant_min"], a["quant_max"])
        check_quant_range(node, dtype, codes)
        block = _block(node, x, scale, a["axis"])
        # The source widens 16-bit data to float32 first.
        compute = promoted(node, torch.float32, dtype_of(scale))
        spec = make_spec(node, (dtype, codes), block, dtype_of(x), Arithmetic(compute))
        check_clamp(node, spec)
        check_zero_point_dtype(zero, compute)
        grid = spec.grid(shape_of(x))
        fitted = fit(node, scale, grid)
        return QdqSite(node, x, fitted, fit_zero_point(node, zero, grid), spec)


class NormalizeDequantizePerChannel(QdqRule):
    """``dequantize_per_channel`` becomes ``qfuse.dequantize`` with one scale per channel.

    Before::

        dequantize_per_channel(w: int8[N, K], float32[N], int64[N], 0, -127, 127, int8)

    After, where the zero points are all zero::

        qfuse.dequantize(w, float32[N, 1], None, "int8[-127,127] 1x* ...")

    Refuses: a subtraction that may wrap or round.
    """

    name = "normalize-dequantize-per-channel"
    anchors = Registered("quantized_decomposed::dequantize_per_channel")
    op: ClassVar[OpOverload] = ops.dequantize

    def read(self, node: Node) -> QdqSite:
        """View a call."""
        a = known_arguments(node, (*_ARGUMENTS, "out_dtype"))
        q, scale, zero = node_of(a["input"]), node_of(a["scales"]), optional_node(a["zero_points"])
        dtype, compute = dtype_argument(a["dtype"]), dtype_of(scale)
        check_operand_dtype(node, q, dtype)
        check_float(scale)
        if dtype.is_floating_point:
            # Torch does not promote float8.
            raise cannot_run(node, f"it multiplies {dtype_name(dtype)} by {dtype_name(compute)}")
        codes = quant_range(node, a["quant_min"], a["quant_max"])
        check_quant_range(node, dtype, codes)
        block = _block(node, q, scale, a["axis"])
        real = dtype_argument(a["out_dtype"], torch.float32)
        spec = make_spec(node, (dtype, codes), block, real, Arithmetic(compute))
        check_subtraction(q, zero, compute)
        grid = spec.grid(shape_of(q))
        fitted = fit(node, scale, grid)
        return QdqSite(node, q, fitted, fit_zero_point(node, zero, grid), spec)


def _block(node: Node, value: Node, scale: Node, axis: Argument) -> Block:
    """Return the block: one scale per index of the axis, or one for the whole axis.

    Raises:
        NormalizeError: There is no such axis, or the number of scales is not its size.
        RefusedError: Sizes are not known.
    """
    shape, scales = shape_of(value), shape_of(scale)
    rank = len(shape)
    assert isinstance(axis, int), f"the schema says so: {axis!r}"
    if not -rank <= axis < rank:
        raise cannot_run(node, f"axis {axis} is not an axis of a tensor of rank {rank}")
    axis %= rank
    count = element_count(scales)
    if count is None:
        text = "the number of scales is not known before run time: {}"
        raise RefusedError(MissCode.SHAPE, scale, text, scales)
    if not scales or count != scales[0]:
        raise _misfit(node, scale, "it is not a list")
    # Asked before the broadcast: one channel with one scale is per channel.
    if same_size(count, shape[axis]):
        return tuple(1 if i == axis else None for i in range(rank))
    if count == 1:
        # It is broadcast: one scale for the whole tensor.
        return (None,) * rank
    if not isinstance(shape[axis], int):
        text = "it is not known before run time whether axis {} has {} channels"
        raise RefusedError(MissCode.SHAPE, node, text, axis, count)
    raise _misfit(node, scale, f"axis {axis} of {tuple(shape)} has {shape[axis]} channels")


def _misfit(node: Node, scale: Node, why: str) -> BlockError:
    return cannot_run(
        node,
        f"a scale of shape {tuple(shape_of(scale))} does not fit: {why}",
        fix="give one scale per channel, as a list",
        kind=BlockError,
    )
