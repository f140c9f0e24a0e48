"""A linear or convolution whose result is scaled and shifted per output channel by constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from qfuse.ir.graph.schema import overload_of
from qfuse.ir.graph.stage_graph import constant_of, op_name
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.convolution import Convolution, as_convolution
from qfuse.ir.ops.linear import Linear, as_linear
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.ir.ops.views import QuantParams, dtype_of, shape_of, tensor_of
from qfuse.ir.quant.element import ScaleFormat
from qfuse.ir.quant.spec import ZeroPointDomain
from qfuse.ir.sizes import same_shape, same_strides
from qfuse.rewrite.prelude import Miss, MissCode, Rewriter

_F32 = torch.float32
# A quantized value is at most this far from a zero point of int32.
_MOST = 1 << 32
_TINY, _HUGE = torch.finfo(_F32).tiny, torch.finfo(_F32).max / _MOST


@dataclass(frozen=True, slots=True)
class Foldable:
    """A linear or convolution with a quantized weight, which may take factors and summands.

    Attributes:
        product: The call.
        weight: Its dequantized weight.
        axis: The axis of the output channels in the result.
        weight_axis: The axis of the output channels in the weight.
        n: The number of output channels.
    """

    product: Linear | Convolution
    weight: Dequantize
    axis: int
    weight_axis: int
    n: int


@dataclass(frozen=True, slots=True)
class AffineSite:
    """``product * factor + shift``, with one number or one per output channel, in float64."""

    into: Foldable
    node: Node
    factor: torch.Tensor
    shift: torch.Tensor


def foldable(value: object, user: Node) -> Foldable | Miss:
    """View ``value`` as a product of which ``user`` may become a part.

    Refuses: a weight that is not quantized, or otherwise than with float32 scales for the tensor or
    for each output channel; other dtypes than float32; a product or weight with other users.
    """
    product = as_linear(value) or as_convolution(value)
    weight = None if product is None else as_dequantize(product.weight)
    if product is None or weight is None:
        text = "the operand is not a linear or convolution with a quantized weight"
        return Miss(MissCode.PATTERN, user, text, progress=0)
    others = sorted({op_name(each) for each in product.node.users if each is not user})
    # Other users need the product before it is scaled.
    if others:
        text = "the {}'s own result is also used by {}"
        kind = "linear" if isinstance(product, Linear) else "convolution"
        return Miss(MissCode.SHARED, product.node, text, kind, ", ".join(others), progress=2)
    # Another product of the same weight is not followed by this constant.
    if len(weight.node.users) > 1:
        text = "the weight has other users"
        return Miss(MissCode.SHARED, weight.node, text, progress=2)
    return _refuse_types(product, weight) or _located(product, weight)


def _refuse_types(product: Linear | Convolution, weight: Dequantize) -> Miss | None:
    params, node = weight.params, weight.node
    spec = params.spec
    # In bfloat16 the new scale would be rounded to 8 bits, for all values of a channel alike.
    types = {
        dtype_of(product.node),
        dtype_of(params.scale),
        spec.float_dtype,
        spec.arithmetic.compute,
    }
    if types != {_F32} or params.outer_scale is not None:
        text = "the weight is not computed in float32 with one level of scales"
        return Miss(MissCode.DTYPE, node, text, progress=2)
    whole = spec.domain in {ZeroPointDomain.INT, ZeroPointDomain.NONE}
    # A power of two times 1.3 is no power of two; a float zero point is added after the scale, so
    # it would have to be multiplied too.
    if spec.scale_format is not ScaleFormat.FLOAT or not whole:
        text = "its scales are powers of two, or its zero points are in floats"
        return Miss(MissCode.ARITHMETIC, node, text, progress=2)
    bias = product.bias
    parts = [part for part in (bias, params.zero_point) if part is not None]
    constants = [constant_value(part) for part in (params.scale, *parts)]
    if constant_of(weight.q) is None or any(value is None for value in constants):
        text = "its weight, scale or bias is computed at run time"
        return Miss(MissCode.NOT_CONSTANT, product.node, text, progress=2)
    if bias is not None and dtype_of(bias) != _F32:
        return Miss(MissCode.DTYPE, bias, "its bias is {}", dtype_of(bias), progress=2)
    return None


def _located(product: Linear | Convolution, weight: Dequantize) -> Foldable | Miss:
    """Find the output channels, which have scales of their own or share one."""
    shape = [int(size) for size in shape_of(product.weight)]
    if isinstance(product, Linear):
        if len(shape) != 2:  # noqa: PLR2004
            # A vector as weight gives one number per row: the last axis holds no channels.
            text = "its weight has {} axes"
            return Miss(MissCode.SHAPE, product.node, text, len(shape), progress=2)
        axis, weight_axis, n = len(shape_of(product.node)) - 1, 0, shape[0]
    else:
        axis, weight_axis = product.axis, int(product.transposed)
        # A transposed weight is [in, out / groups, ...]: its output axis repeats for every group.
        groups = product.groups if product.transposed else 1
        if not isinstance(groups, int):
            text = "its groups are computed at run time"
            return Miss(MissCode.ARGUMENT, product.node, text, progress=2)
        n = shape[weight_axis] * groups
    block = weight.params.spec.block
    rest = [size for i, size in enumerate(block) if i != weight_axis]
    if block[weight_axis] not in {1, None} or any(size is not None for size in rest):
        text = "its weight has scales in blocks of {}"
        details = weight.params.spec.block_text()
        return Miss(MissCode.GRANULARITY, weight.node, text, details, progress=2)
    return Foldable(product, weight, axis, weight_axis, n)


def constant_per_channel(into: Foldable, value: object, user: Node) -> torch.Tensor | Miss:
    """Return a constant as one number, or as one per output channel: float64, ``[]`` or ``[n]``.

    Refuses: values that are computed at run time, that are not finite, or that vary along other
    axes.
    """
    number = isinstance(value, (int, float))
    # float64, so that the product of scale and factor is rounded once, when it is stored.
    known = torch.tensor(value, dtype=torch.float64) if number else constant_value(value)
    if known is None:
        # Fused into the epilogue instead, if at all.
        return Miss(MissCode.NOT_CONSTANT, user, "the constant is not known", progress=0)
    if known.dtype is torch.bool or known.dtype.is_complex:
        return Miss(MissCode.DTYPE, user, "a constant of {}", known.dtype, progress=2)
    rank = len(shape_of(into.product.node))
    wide = (1,) * (rank - known.dim()) + tuple(known.shape)
    rest = [size for i, size in enumerate(wide) if i != into.axis]
    if len(wide) != rank or any(size != 1 for size in rest) or wide[into.axis] not in {1, into.n}:
        text = "a constant of shape {} is not one number per output channel"
        return Miss(MissCode.AXIS, user, text, tuple(known.shape), progress=2)
    flat = known.double().reshape(-1)
    # As a factor of a scale, infinity makes NaN of every weight of 0.
    if not bool(flat.isfinite().all()):
        return Miss(MissCode.RANGE, user, "the constant is not finite", progress=2)
    return flat[0] if flat.numel() == 1 else flat


def affine_site(
    into: Foldable, node: Node, result: Node, *, factor: torch.Tensor, shift: torch.Tensor
) -> AffineSite | Miss:
    """Return the site of ``node``, whose value is ``result``, if the new scales are usual floats.

    Refuses: scales that would be 0, tiny or huge; several scales along an axis that is shared by
    groups; a result of another type.
    """
    product = into.product
    old, new = tensor_of(product.node), tensor_of(result)
    if not same_shape(old.shape, new.shape) or old.dtype != new.dtype:
        text = "it changes the shape or dtype of its operand"
        return Miss(MissCode.DTYPE, node, text, progress=2)
    # With a constant of the full rank, an elementwise
    # op may order the axes of its result otherwise.
    if not same_strides(old, new):
        return Miss(MissCode.SHAPE, node, "it changes the strides of its operand", progress=2)
    # Output channel 0 of both groups uses scale 0, so they cannot have factors of their own.
    if factor.dim() and int(shape_of(product.weight)[into.weight_axis]) != into.n:
        text = "groups of a transposed convolution share the scales of its weight"
        return Miss(MissCode.AXIS, node, text, progress=2)
    size = _scale(into, factor).abs()
    # A scale of 0 or a subnormal one loses bits of the weight, and a
    # huge one overflows where it is multiplied by quantized values.
    if not bool(((size >= _TINY) & (size <= _HUGE)).all()):
        text = "the scale of the weight would be 0, or too small or large for float32"
        return Miss(MissCode.RANGE, node, text, progress=2)
    return AffineSite(into, node, factor, shift)


def fold(site: AffineSite, rw: Rewriter) -> Node:
    """Add the product with the new scale and bias; parts that do not change are kept."""
    into, product = site.into, site.into.product
    weight = product.weight if _is_one(site.factor) else _scaled_weight(site, rw)
    bias = _bias(site, rw)
    if isinstance(product, Linear):
        return rw.call(torch.ops.aten.linear.default, product.x, weight, bias)
    op = overload_of(into.product.node)
    assert op is not None, "a convolution is a call"
    return rw.call(op, product.x, weight, bias, *product.settings.values())


def _scale(into: Foldable, factor: torch.Tensor) -> torch.Tensor:
    """Return the scale times the factor, in the rank of the weight and in float64."""
    scale = constant_value(into.weight.params.scale)
    assert scale is not None, "the scale is a constant"
    return scale.double() * _on_axis(into, factor)


def _on_axis(into: Foldable, values: torch.Tensor) -> torch.Tensor:
    rank = len(shape_of(into.product.weight))
    grid = [-1 if i == into.weight_axis else 1 for i in range(rank)]
    return values.reshape(grid) if values.dim() else values


def _scaled_weight(site: AffineSite, rw: Rewriter) -> Node:
    into, old = site.into, site.into.weight
    scale, spec, zero = _scale(into, site.factor).float(), old.params.spec, old.params.zero_point
    if site.factor.dim():
        block = tuple(1 if i == into.weight_axis else size for i, size in enumerate(spec.block))
        spec = replace(spec, block=block)
        # Scale and zero point have one grid, which now has one entry per channel.
        zero = None if zero is None else _expanded(zero, scale.shape, rw)
    params = QuantParams(spec, rw.constant(scale, f"{old.q.target}_scale"), zero)
    return rw.call(ops.dequantize, *params.call_args(old.q))


def _expanded(zero: Node, shape: Sequence[int], rw: Rewriter) -> Node:
    value = constant_value(zero)
    assert value is not None, "the zero point is a constant"
    return rw.constant(value.expand(tuple(shape)).contiguous(), f"{zero.target}_per_channel")


def _bias(site: AffineSite, rw: Rewriter) -> Node | None:
    own = site.into.product.bias
    value = None if own is None else constant_value(own)
    # Unchanged: no second copy of the constant is stored.
    if own is not None and _is_one(site.factor) and bool((site.shift == 0).all()):
        return own
    if value is None and bool((site.shift == 0).all()):
        return None
    before = torch.zeros((), dtype=torch.float64) if value is None else value.double()
    after = (before * site.factor + site.shift).float()
    hint = f"{site.into.weight.q.target}_bias" if own is None else f"{own.target}_folded"
    return rw.constant(after.expand(site.into.n).contiguous(), hint)


def _is_one(factor: torch.Tensor) -> bool:
    return bool((factor == 1).all())
