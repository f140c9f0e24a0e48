"""Read a norm in any of its spellings, such that ``ir/ops/norm_spec.py`` computes the same bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from qfuse.ir.dtypes import widens
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.ops.norm_spec import NormSpec, Statistic
from qfuse.ir.ops.views import dtype_of, node_of, optional_node, result_of, shape_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.ir.sizes import same_shape, sizes_of
from qfuse.optimize.fuse.match_norm_parts import Factor, centred_of, factor_of, is_float, operands
from qfuse.optimize.match.casts import cast_source, exact_source
from qfuse.rewrite.prelude import Miss, MissCode, Node, arguments, aten

_RMS_NORMS = (aten.rms_norm.default,)
_LAYER_NORMS = (aten.layer_norm.default, aten.native_layer_norm.default)


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm that was recognized.

    Attributes:
        node: Its result.
        x: What is normalized, without casts that keep its numbers.
        weight: What the result is multiplied by.
        bias: What is added to it.
        spec: How it is computed.
        layer: Whether it is a layer norm; otherwise an RMS norm.
        inner: The nodes between ``x`` and the result.
        casts: Those among them, or between ``x`` and them, that only widen: others may read them.
    """

    node: Node
    x: Node
    weight: Node | None
    bias: Node | None
    spec: NormSpec
    layer: bool
    inner: tuple[Node, ...]
    casts: tuple[Node, ...] = ()

    def dying(self) -> frozenset[Node]:
        """Return the nodes that nothing needs any more once another op gives the result."""
        gone = {self.node, *self.inner}
        pending = [c for c in self.casts if c not in gone]
        while found := [c for c in pending if all(user in gone for user in c.users)]:
            gone.update(found)
            pending = [c for c in pending if c not in gone]
        return frozenset(gone)


def norm_of(y: Node) -> Norm | Miss:
    """Read the norm that ends at ``y``; refuse with the reason what is nearly one.

    What reads the nodes on the way is not looked at.
    """
    node = cast_source(y) or y
    norm = _whole(node) or _spelled(node)
    if isinstance(norm, Miss):
        return norm
    if norm.spec.out != dtype_of(y):
        # There is one place for a rounding at the end.
        if norm.spec.out != _natural(norm):
            text = "the norm is rounded to {} and then to {}"
            told = dtype_name(norm.spec.out), dtype_name(dtype_of(y))
            return Miss(MissCode.DTYPE, y, text, *told, progress=3)
        norm = replace(norm, spec=replace(norm.spec, out=dtype_of(y)))
    inner = dict.fromkeys((node, *norm.inner))
    return replace(norm, node=y, inner=tuple(n for n in inner if n is not y))


def _natural(norm: Norm) -> torch.dtype:
    """Return the type of the result before it is cast."""
    if norm.spec.statistic is Statistic.WHOLE:
        return norm.spec.compute
    dtype = norm.spec.rounded
    for operand in (norm.weight, norm.bias):
        if operand is not None and shape_of(operand):
            dtype = torch.promote_types(dtype, dtype_of(operand))
    return dtype


def _whole(node: Node) -> Norm | Miss | None:
    """Read one of torch's own ops; ``None`` for any other node."""
    call, inner = node, [node]
    result = result_of(node)
    if result is not None:
        call, inner = result[0], [node, result[0]]
    if not is_call(call, *_RMS_NORMS, *_LAYER_NORMS):
        return None
    if result is not None and result[1] != 0:
        text = "it is a statistic of {}, not its result"
        return Miss(MissCode.PATTERN, node, text, op_name(call), progress=1)
    a = arguments(call)
    tensor = node_of(a["input"])
    shape = sizes_of(a["normalized_shape"])
    if not is_float(tensor) or not shape:
        return Miss(MissCode.DTYPE, call, "it is not of real numbers", progress=2)
    if not same_shape(shape, shape_of(tensor)[-len(shape) :]):
        text = "it is over {}, which are not the last axes"
        return Miss(MissCode.SHAPE, call, text, shape, progress=2)
    read = _whole_rms if is_call(call, *_RMS_NORMS) else _whole_layer
    return read(call, tensor, len(shape), tuple(inner))


def _whole_rms(call: Node, tensor: Node, axes: int, inner: tuple[Node, ...]) -> Norm | Miss:
    """Torch computes an RMS norm as it is spelled, in float32 at least, and casts back."""
    a = arguments(call)
    own = dtype_of(tensor)
    wide = torch.promote_types(own, torch.float32)
    eps = a["eps"] if a["eps"] is not None else torch.finfo(wide).eps
    if not isinstance(eps, (int, float)) or not 0 <= eps < math.inf:
        return Miss(MissCode.ARGUMENT, call, "eps is {}", eps, progress=2)
    spec = NormSpec(axes, float(eps), wide, wide, wide, own)
    x, casts = exact_source(tensor)
    return Norm(call, x, optional_node(a["weight"]), None, spec, False, inner, tuple(casts))


def _whole_layer(call: Node, tensor: Node, axes: int, inner: tuple[Node, ...]) -> Norm | Miss:
    a = arguments(call)
    own, eps = dtype_of(tensor), a["eps"]
    if not isinstance(eps, (int, float)) or not 0 <= eps < math.inf:
        return Miss(MissCode.ARGUMENT, call, "eps is {}", eps, progress=2)
    spec = NormSpec(axes, float(eps), own, own, own, own, statistic=Statistic.WHOLE)
    x, casts = exact_source(tensor)
    weight, bias = optional_node(a["weight"]), optional_node(a["bias"])
    return Norm(call, x, weight, bias, spec, True, inner, tuple(casts))


def _spelled(node: Node) -> Norm | Miss:
    """Read a norm that is written out: the product, a weight and a bias behind it, or neither."""
    norm = _weighted(node)
    if isinstance(norm, Norm) or not is_call(node, aten.add.Tensor):
        return norm
    shifted = _either(node, _weighted, _with_bias)
    return shifted if isinstance(shifted, Norm) else _closer(norm, shifted)


def _weighted(node: Node) -> Norm | Miss:
    norm = _rounded(node)
    if isinstance(norm, Norm) or not is_call(node, aten.mul.Tensor):
        return norm
    scaled = _either(node, _rounded, _with_weight)
    return scaled if isinstance(scaled, Norm) else _closer(norm, scaled)


def _either(
    node: Node, read: Callable[[Node], Norm | Miss], grow: Callable[[Norm, Node, Node], Norm | Miss]
) -> Norm | Miss:
    """Read one operand of ``node`` as a norm and let it grow by the other."""
    best = Miss(MissCode.PATTERN, node, "no operand of {} is a norm", op_name(node), progress=0)
    for inner, other in operands(node):
        norm = read(inner)
        if isinstance(norm, Norm):
            norm = replace(norm, inner=(inner, *(n for n in norm.inner if n is not inner)))
            norm = grow(norm, node, other)
        if isinstance(norm, Norm):
            return norm
        best = _closer(best, norm)
    return best


def _with_weight(norm: Norm, node: Node, weight: Node) -> Norm | Miss:
    wrong = _refuse_operand(norm, node, weight)
    return wrong or replace(norm, weight=weight, spec=replace(norm.spec, out=dtype_of(node)))


def _with_bias(norm: Norm, node: Node, bias: Node) -> Norm | Miss:
    if not norm.layer:
        return Miss(MissCode.PATTERN, node, "an RMS norm has no bias", progress=3)
    wrong = _refuse_operand(norm, node, bias)
    return wrong or replace(norm, bias=bias, spec=replace(norm.spec, out=dtype_of(node)))


def _refuse_operand(norm: Norm, node: Node, operand: Node) -> Miss | None:
    if operand in norm.inner:
        text = "the norm is multiplied by a part of itself"
        return Miss(MissCode.PATTERN, node, text, progress=3)
    if not same_shape(shape_of(node), shape_of(norm.x)):
        text = "an operand of shape {} does not broadcast over a norm of shape {}"
        told = tuple(shape_of(operand)), tuple(shape_of(norm.x))
        return Miss(MissCode.SHAPE, operand, text, *told, progress=3)
    if not shape_of(operand) and dtype_of(operand) != dtype_of(node):
        # Whether torch rounds a scalar to the type of the product depends on which side it is on.
        text = "a scalar of {} for numbers of {}"
        types = dtype_name(dtype_of(operand)), dtype_name(dtype_of(node))
        return Miss(MissCode.DTYPE, operand, text, *types, progress=3)
    return None


def _rounded(node: Node) -> Norm | Miss:
    """Read a product that may be rounded before the weight."""
    source = cast_source(node)
    if source is None:
        return _product(node)
    norm = _product(source)
    if isinstance(norm, Miss):
        return norm
    dtype = dtype_of(node)
    spec = replace(norm.spec, rounded=dtype, out=dtype)
    return replace(norm, spec=spec, inner=(source, *norm.inner))


def _product(node: Node) -> Norm | Miss:
    """Read a tensor times the root of its variance, or divided by it."""
    divides = is_call(node, aten.div.Tensor)
    best = Miss(MissCode.PATTERN, node, "{} is no norm", op_name(node), progress=0)
    if not divides and not is_call(node, aten.mul.Tensor):
        return best
    for scaled, by in operands(node)[: 1 if divides else 2]:
        factor = factor_of(by, divides=divides)
        norm = factor if isinstance(factor, Miss) else _divided(node, scaled, by, factor)
        if isinstance(norm, Norm):
            return norm
        best = _closer(best, norm)
    return best


def _divided(node: Node, scaled: Node, by: Node, factor: Factor) -> Norm | Miss:
    variance, product = factor.variance, dtype_of(node)
    compute = dtype_of(variance.source)
    if dtype_of(by) != product and not widens(compute, dtype_of(by)):
        text = "the factor is rounded to {} for a product in {}"
        told = dtype_name(dtype_of(by)), dtype_name(product)
        return Miss(MissCode.DTYPE, by, text, *told, progress=3)
    spec = NormSpec(
        variance.axes,
        variance.eps,
        compute,
        product,
        product,
        product,
        factor.root,
        variance.statistic,
    )
    centred = centred_of(scaled)
    norm = _rms(scaled, spec, factor) if centred is None else _layer(scaled, spec, factor)
    if isinstance(norm, Norm) and not same_shape(shape_of(node), shape_of(norm.x)):
        return Miss(MissCode.SHAPE, node, "the factor changes the shape", progress=3)
    return norm


def _rms(scaled: Node, spec: NormSpec, factor: Factor) -> Norm | Miss:
    variance = factor.variance
    if spec.statistic is not Statistic.SQUARES:
        text = "what is divided by a deviation is not centred"
        return Miss(MissCode.PATTERN, scaled, text, progress=3)
    (x, first), (source, second) = exact_source(scaled), exact_source(variance.source)
    if x is not source:
        text = "the mean square is of {}, what it divides is {}"
        return Miss(MissCode.PATTERN, scaled, text, source.name, x.name, progress=3)
    casts = (*first, *second, *variance.casts)
    return Norm(scaled, x, None, None, spec, False, factor.inner, casts)


def _layer(scaled: Node, spec: NormSpec, factor: Factor) -> Norm | Miss:
    variance = factor.variance
    centred = centred_of(scaled)
    assert centred is not None, "asked before"
    inner, casts = [*factor.inner, *centred.inner], [*centred.casts, *variance.casts]
    if spec.statistic is Statistic.SQUARES:
        again = centred_of(variance.source)
        if again is None:
            # The deviation is not that of a layer norm, but what is centred may have an RMS norm.
            return _rms(scaled, spec, factor)
        source, axes = again.x, again.axes
        inner += again.inner
        casts += again.casts
        computed = dtype_of(again.inner[0])
    else:
        source, more = exact_source(variance.source)
        axes, computed = variance.axes, dtype_of(variance.source)
        casts += more
    if source is not centred.x:
        text = "the deviation is that of {}, what it divides is {}"
        told = source.name, centred.x.name
        return Miss(MissCode.PATTERN, scaled, text, *told, progress=3)
    if not centred.axes == axes == variance.axes:
        text = "mean and variance are over {}, {} and {} axes"
        counts = centred.axes, axes, variance.axes
        return Miss(MissCode.AXIS, scaled, text, *counts, progress=3)
    if not dtype_of(centred.inner[0]) == computed == spec.compute:
        text = "mean and variance are computed in other types"
        return Miss(MissCode.DTYPE, scaled, text, progress=3)
    unique = tuple(dict.fromkeys(inner))
    return Norm(scaled, centred.x, None, None, spec, True, unique, tuple(casts))


def _closer(a: Miss, b: Miss) -> Miss:
    return b if b.progress > a.progress else a
