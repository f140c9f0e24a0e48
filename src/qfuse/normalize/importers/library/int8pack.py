"""``aten._weight_int8pack_mm``: float activations, int8 weights with a scale per output feature."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.dtypes import FLOATS
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.views import dtype_of, node_of, shape_of
from qfuse.ir.quant.spec import Arithmetic, dtype_range
from qfuse.normalize.aten.linear.weights import call_linear
from qfuse.normalize.importers.library.encoding import Encoding, ProductRule, check_dtype
from qfuse.normalize.importers.qdq import make_spec
from qfuse.normalize.importers.qparams import fit
from qfuse.normalize.importers.rule import RefusedError, known_arguments
from qfuse.rewrite.prelude import MissCode, Node, OpOverload, Rewriter, aten

_LOWEST = 128


@dataclass(frozen=True, slots=True)
class WeightOnlySite:
    """A product of float activations with a quantized weight.

    Attributes:
        node: The library's product.
        x: The activation, ``[M, K]``.
        weight: The weight, ``[N, K]``.
    """

    node: Node
    x: Node
    weight: Encoding


class WeightOnlyRule(ProductRule[WeightOnlySite], ABC):
    """Replaces the op by a dequantize of its weight and ``aten.linear``."""

    def rewrite(self, site: WeightOnlySite, rw: Rewriter) -> None:
        """Add the dequantize and the linear."""
        weight = site.weight.dequantize(rw, site.node.name)
        rw.replace(site.node, call_linear(rw, site.x, weight))


class NormalizeInt8PackMm(WeightOnlyRule):
    """``_weight_int8pack_mm(x, weight, scales)`` becomes ``linear(x, dequantize(weight))``.

    Refuses: a weight other than int8; scales of another dtype than the activation's, or other
    than one per output feature; weights that may leave the range of float16.
    """

    name = "normalize-int8pack-mm"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten._weight_int8pack_mm.default,)

    def read(self, node: Node) -> WeightOnlySite:
        """View a call."""
        a = known_arguments(node, ("self", "mat2", "scales"))
        x, weight, scales = node_of(a["self"]), node_of(a["mat2"]), node_of(a["scales"])
        float_dtype = dtype_of(x)
        check_dtype(node, "activation", float_dtype, FLOATS)
        check_dtype(node, "weight", dtype_of(weight), (torch.int8,))
        check_dtype(node, "scale", dtype_of(scales), (float_dtype,))
        stored = torch.int8, dtype_range(torch.int8)
        spec = make_spec(node, stored, (1, None), float_dtype, Arithmetic(torch.float32))
        scale = fit(node, scales, spec.grid(shape_of(weight)))
        check_float16(node, float_dtype, constant_value(scales), _LOWEST)
        return WeightOnlySite(node, x, Encoding(weight, scale, None, spec))


def check_float16(
    node: Node,
    float_dtype: torch.dtype,
    scale: torch.Tensor | None,
    steps: int,
    offset: torch.Tensor | None = None,
) -> None:
    """Check that no weight leaves the range of float16, to which the op does not round weights.

    Args:
        node: The library's product.
        float_dtype: The dtype of the activation.
        scale: The scales, if they are known.
        steps: The greatest magnitude of a weight in steps.
        offset: What is added to every weight.

    Raises:
        RefusedError: One may leave it.
    """
    if float_dtype is not torch.float16:
        return
    if scale is not None:
        bound = scale.double().abs() * steps
        if offset is not None:
            bound = bound + offset.double().abs()
        if bool((bound <= torch.finfo(torch.float16).max).all()):
            return
    text = "its weights may leave the range of float16, in which a dequantize returns them"
    raise RefusedError(MissCode.RANGE, node, text)
