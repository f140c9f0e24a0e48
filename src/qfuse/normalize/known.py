"""What is known about the values of zero points and stored numbers before run time."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING

import torch

from qfuse.ir.choose_spec import Formula
from qfuse.ir.schema import arguments, is_call
from qfuse.ir.views import as_choose, as_quantize, dtype_of, node_of
from qfuse.normalize.constants import constant_value

if TYPE_CHECKING:
    from torch.fx import Node

    from qfuse.ir.choose_spec import ChooseSpec

__all__ = ["Bounds", "bounds_of", "exact_integers", "fixed_zero_point", "is_zero"]

_aten = torch.ops.aten

Bounds = tuple[int, int]

_SAME_VALUES = (
    _aten.view.default,
    _aten.reshape.default,
    _aten._unsafe_view.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.unsqueeze.default,
    _aten.expand.default,
    _aten.clone.default,
    _aten._to_copy.default,
)
_ZEROS = (_aten.zeros_like.default, _aten.zeros.default, _aten.new_zeros.default)
_FULLS = (_aten.full_like.default, _aten.full.default, _aten.new_full.default)


def is_zero(node: Node) -> bool:
    """Whether every element of ``node`` is known to be zero."""
    value = constant_value(node)
    if value is not None:
        # A negative zero is not nothing: -0.0 - (-0.0) is 0.0.
        return not bool(value.any()) and not bool(torch.signbit(value).any())
    if is_call(node, *_SAME_VALUES):
        return is_zero(node_of(arguments(node)["self"]))
    if is_call(node, *_ZEROS):
        return True
    if is_call(node, *_FULLS):
        fill = arguments(node)["fill_value"]
        return isinstance(fill, (int, float)) and fill == 0
    chosen = _choice_of_zero_point(node)
    return chosen is not None and fixed_zero_point(chosen) == 0


def fixed_zero_point(spec: ChooseSpec) -> int | None:
    """Return the zero point that a formula always chooses, ``None`` if it depends on the data."""
    match spec.formula:
        case Formula.AO_SYMMETRIC | Formula.AO_SYMMETRIC_NO_CLIPPING:
            return int((spec.quant_max + spec.quant_min + 1) / 2)
        case Formula.DECOMPOSED_SYMMETRIC:
            return 128 if spec.dtype is torch.uint8 else 0
        case Formula.TOKEN_SYMMETRIC | Formula.AO_FLOAT8:
            return 0
        case Formula.AO_ASYMMETRIC | Formula.DECOMPOSED_AFFINE | Formula.TOKEN_ASYMMETRIC:
            return None


def bounds_of(node: Node, *, look: bool = True) -> Bounds | None:
    """Return integers between which every element of ``node`` lies; ``None`` if none are known.

    Args:
        node: Stored numbers or a zero point.
        look: Look at the values of constants and at what computed the rest; otherwise only at
            the dtype, which costs nothing.
    """
    if look:
        found = _bounds_by_values(node)
        if found is not None:
            return found
    dtype = dtype_of(node)
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return None
    info = torch.iinfo(dtype)
    return info.min, info.max


def exact_integers(dtype: torch.dtype) -> Bounds:
    """Return the range in which ``dtype`` represents every integer."""
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return info.min, info.max
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    return -(2**digits), 2**digits


def _bounds_by_values(node: Node) -> Bounds | None:
    if is_zero(node):
        return 0, 0
    value = constant_value(node)
    if value is not None:
        return _bounds_of_constant(value)
    if is_call(node, *_SAME_VALUES):
        source = node_of(arguments(node)["self"])
        # A cast to a narrower type may wrap, so only the values behind a wider one are the same.
        wider = torch.promote_types(dtype_of(source), dtype_of(node)) == dtype_of(node)
        return bounds_of(source) if wider else None
    made = as_quantize(node)
    codes = _choice_of_zero_point(node) if made is None else made.params.spec
    return None if codes is None else (codes.quant_min, codes.quant_max)


def _bounds_of_constant(value: torch.Tensor) -> Bounds | None:
    if value.dtype.is_floating_point or value.dtype is torch.bool:
        return None
    if value.numel() == 0:
        return 0, 0
    low, high = torch.aminmax(value)
    return int(low), int(high)


def _choice_of_zero_point(node: Node) -> ChooseSpec | None:
    """Return the spec of the choice that ``node`` is the zero point of."""
    if node.op != "call_function" or node.target is not operator.getitem or node.args[1] != 1:
        return None
    choose = as_choose(node.args[0])
    return None if choose is None else choose.spec
