"""``quantized_decomposed.(de)quantize_per_tensor``, with parameters as numbers or tensors.

Both compute in float32 whatever their parameters are: a scale that is a tensor is first read by
``.item()`` into a Python float. Quantize multiplies by ``1 / scale``, computed in float64 and
rounded to float32. A float32 scale keeps its dtype here, because the reciprocal in float32 is the
same number: a quotient of two 24-bit numbers, rounded to 53 bits and then to 24, is rounded once.
A narrower scale is widened.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.fx.node import Argument

from qfuse.ir.errors import BlockError
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.constants import number_of
from qfuse.ir.ops.qdq import as_quantize
from qfuse.ir.ops.views import bits_equal, dtype_of, node_of, shape_of
from qfuse.ir.quant.spec import Arithmetic, dtype_name
from qfuse.ir.sizes import element_count
from qfuse.normalize.importers.errors import cannot_run
from qfuse.normalize.importers.qdq import (
    QdqRule,
    QdqSite,
    check_clamp,
    check_operand_dtype,
    check_quant_range,
    check_rounds_nothing,
    exact_difference,
    make_spec,
    quant_range,
)
from qfuse.normalize.importers.qparams import Param, check_float, fit, fit_zero_point, literal
from qfuse.normalize.importers.rule import RefusedError, dtype_argument, known_arguments, promoted
from qfuse.normalize.importers.torch_ops import Registered
from qfuse.rewrite.prelude import MissCode, Node, OpOverload

_ARGUMENTS = ("input", "scale", "zero_point", "quant_min", "quant_max", "dtype")
_READABLE = (torch.float32, torch.float16, torch.bfloat16)


class NormalizeQuantizePerTensor(QdqRule):
    """``quantize_per_tensor`` becomes ``qfuse.quantize`` with one scale.

    Before::

        quantize_per_tensor(x, 0.02, 128, 0, 255, uint8)

    After::

        qfuse.quantize(x, float64[1, 1], int64[1, 1], "uint8[0,255] *x* ...")

    Refuses: Python numbers that are known only at run time; float8, which this op rounds to
    integers first; bounds that are not exact in float32.
    """

    name = "normalize-quantize-per-tensor"
    anchors = Registered("quantized_decomposed::quantize_per_tensor")
    op: ClassVar[OpOverload] = ops.quantize

    def read(self, node: Node) -> QdqSite:
        """View any overload."""
        a = known_arguments(node, _ARGUMENTS)
        x, dtype = node_of(a["input"]), dtype_argument(a["dtype"])
        check_readable(node, x)
        check_rounds_nothing(node, dtype)
        codes = quant_range(node, number_of(a["quant_min"]), number_of(a["quant_max"]))
        check_quant_range(node, dtype, codes)
        block = (None,) * len(shape_of(x))
        spec = make_spec(node, (dtype, codes), block, dtype_of(x), Arithmetic())
        check_clamp(node, spec)
        # `1.0 / 0.0` raises in Python.
        if number_of(a["scale"]) == 0:
            raise cannot_run(node, "its scale is 0, and it divides by its scale")
        scale = _scale(node, x, a["scale"])
        return QdqSite(node, x, scale, _zero_point(node, x, a["zero_point"]), spec)


class NormalizeDequantizePerTensor(QdqRule):
    """``dequantize_per_tensor`` becomes ``qfuse.dequantize`` with one scale.

    Refuses: Python numbers that are known only at run time; quantized values whose difference from
    the zero point may not be exact in a 16-bit output dtype, in which it is computed.
    """

    name = "normalize-dequantize-per-tensor"
    anchors = Registered("quantized_decomposed::dequantize_per_tensor")
    op: ClassVar[OpOverload] = ops.dequantize

    def read(self, node: Node) -> QdqSite:
        """View any overload."""
        a = known_arguments(node, (*_ARGUMENTS, "out_dtype"))
        q, dtype = node_of(a["input"]), dtype_argument(a["dtype"])
        check_operand_dtype(node, q, dtype)
        codes = quant_range(node, number_of(a["quant_min"]), number_of(a["quant_max"]))
        real = dtype_argument(a["out_dtype"], torch.float32)
        # Python numbers are not rounded in 16-bit arithmetic, so the product is rounded once, from
        # float32.
        compute = promoted(node, real, torch.float32)
        block = (None,) * len(shape_of(q))
        spec = make_spec(node, (dtype, codes), block, real, Arithmetic(compute))
        # A 16-bit source rounds the difference before it multiplies; the canonical op computes both
        # in float32.
        if real != compute:
            _check_difference(node, q, a["zero_point"], real)
        scale, zero = _scale(node, q, a["scale"]), _zero_point(node, q, a["zero_point"])
        made = as_quantize(q)
        if made is not None:
            scale = _known_as(scale, made.params.scale)
            zero = None if zero is None else _known_as(zero, made.params.zero_point)
        return QdqSite(node, q, scale, zero, spec)


def check_readable(node: Node, x: Node) -> None:
    """Check that a quantize has an operand of a supported float dtype.

    Raises:
        NormalizeError: It does not, and raises at run time.
    """
    if dtype_of(x) not in _READABLE:
        names = ", ".join(map(dtype_name, _READABLE))
        raise cannot_run(node, f"it quantizes {dtype_name(dtype_of(x))}, and takes {names}")


def _scale(node: Node, data: Node, value: Argument) -> Param:
    """Return the scale: float64 if it was a literal, as the source computes with it."""
    given = literal(value, data, torch.float64)
    if given is not None:
        return given
    tensor = _one_element(node, value, "scale")
    check_float(tensor)
    fitted = fit(node, tensor, (1,) * len(shape_of(data)))
    wide = promoted(node, fitted.dtype, torch.float32)
    return Param(fitted.source, fitted.shape, wide)


def _zero_point(node: Node, data: Node, value: Argument) -> Param | None:
    """Return the zero point, or ``None`` for zero."""
    if isinstance(value, int) and value == 0:
        return None
    given = literal(value, data, torch.int64)
    if given is not None:
        return given
    tensor = _one_element(node, value, "zero point")
    return fit_zero_point(node, tensor, (1,) * len(shape_of(data)))


def _known_as(param: Param, other: Node | None) -> Param:
    """Return ``other`` if it holds the same constant as a literal, so that both share one node."""
    value = None if other is None else constant_of(other)
    if other is None or value is None or not isinstance(param.source, torch.Tensor):
        return param
    alike = value.dtype == param.dtype and value.shape == param.source.shape
    same = alike and not value.is_meta and bits_equal(value, param.source)
    return Param(other, param.shape, param.dtype) if same else param


def _one_element(node: Node, value: Argument, what: str) -> Node:
    """Return the node of a parameter that is a tensor of one element.

    Raises:
        BlockError: It has more elements.
        RefusedError: It is not a tensor, or its size is not known.
    """
    if not isinstance(value, Node) or not isinstance(value.meta.get("val"), torch.Tensor):
        text = "the {} is a Python number that is known only at run time"
        raise RefusedError(MissCode.NOT_CONSTANT, node, text, what)
    shape = shape_of(value)
    count = element_count(shape)
    if count is None:
        text = "it is not known before run time whether the {} of shape {} is one number"
        raise RefusedError(MissCode.SHAPE, node, text, what, shape)
    if count != 1:
        raise cannot_run(
            node,
            f"a {what} of shape {tuple(shape)} does not fit: one number is needed per tensor",
            fix="give one number, or quantize per channel",
            kind=BlockError,
        )
    return value


def _check_difference(node: Node, q: Node, zero_point: Argument, within: torch.dtype) -> None:
    if not isinstance(zero_point, (int, Node)) or not exact_difference(q, zero_point, within):
        text = "it subtracts the zero point in {}, which may round"
        raise RefusedError(MissCode.ARITHMETIC, node, text, dtype_name(within))
