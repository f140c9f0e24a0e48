"""``aten._weight_int4pack_mm_for_cpu``: 4-bit weights, packed for the CPU, in groups."""

from __future__ import annotations

from typing import ClassVar

import torch

from qfuse.ir.dtypes import FLOATS
from qfuse.ir.ops.views import dtype_of, node_of, shape_of
from qfuse.ir.quant.spec import Arithmetic, QuantSpec, ZeroPointDomain
from qfuse.normalize.importers.library.encoding import (
    Encoding,
    Fixed,
    Unpacked,
    check_dtype,
    constant_values,
)
from qfuse.normalize.importers.library.int8pack import (
    WeightOnlyRule,
    WeightOnlySite,
    check_float16,
)
from qfuse.normalize.importers.library.unpack_int4 import unpack_int4
from qfuse.normalize.importers.rule import RefusedError, known_arguments
from qfuse.rewrite.prelude import MissCode, Node, OpOverload, aten

_MIDDLE = 8
_PAIR = 2


class NormalizeInt4PackMm(WeightOnlyRule):
    """``_weight_int4pack_mm_for_cpu(x, packed, group, scales_and_zeros)`` becomes a linear.

    The weight is unpacked at compile time: ``(q - 8) * scale + zero``, in groups of input features.

    Refuses: a packed weight or parameters that are not constants; a layout that is not the one
    that ``_convert_weight_to_int4pack_for_cpu`` writes on this machine; groups that do not divide
    the input features; weights that may leave the range of float16.
    """

    name = "normalize-int4pack-mm"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten._weight_int4pack_mm_for_cpu.default,)

    def read(self, node: Node) -> WeightOnlySite:
        """View a call."""
        a = known_arguments(node, ("self", "mat2", "qGroupSize", "qScaleAndZeros"))
        x, packed = node_of(a["self"]), node_of(a["mat2"])
        float_dtype = dtype_of(x)
        check_dtype(node, "activation", float_dtype, FLOATS)
        check_dtype(node, "packed weight", dtype_of(packed), (torch.uint8,))
        pairs = constant_values(node_of(a["qScaleAndZeros"]), "pair of scale and zero")
        check_dtype(node, "scale", pairs.dtype, (float_dtype,))
        rows, k, group = int(shape_of(packed)[0]), shape_of(x)[-1], a["qGroupSize"]
        if not isinstance(k, int) or not isinstance(group, int):
            text = "its number of input features is not known at compile time"
            raise RefusedError(MissCode.SHAPE, node, text)
        if k % group or tuple(pairs.shape) != (k // group, rows, _PAIR):
            text = "its scales of shape {} are not one pair per group of {} of {} input features"
            raise RefusedError(MissCode.SHAPE, node, text, tuple(pairs.shape), group, k)
        weight = unpack_int4(constant_values(packed, "packed weight"), rows, k)
        if weight is None:
            text = "its weight is not in the layout that this machine packs"
            raise RefusedError(MissCode.PATTERN, node, text)
        scale, zero = (part.t().contiguous() for part in pairs.unbind(-1))
        check_float16(node, float_dtype, scale, _MIDDLE, zero)
        spec = QuantSpec(
            torch.uint8,
            0,
            15,
            (1, group),
            float_dtype,
            Arithmetic(torch.float32),
            ZeroPointDomain.FLOAT_OFFSET,
        )
        held = Unpacked(packed, weight)
        return WeightOnlySite(node, x, Encoding(held, Fixed(scale), Fixed(zero), spec))
