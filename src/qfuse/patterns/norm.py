"""RMS and layer norms in all spellings that ``ir/ops/norm_spec.py`` computes bit for bit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from qfuse.ir.dtypes import widens
from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.norm_spec import NormSpec, Statistic
from qfuse.ir.ops.views import dtype_of, node_of, optional_node, result_of, shape_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.ir.sizes import same_shape, sizes_of
from qfuse.patterns.casts import EXACT_CAST, FLOAT_CAST, exact_source, float_cast_source
from qfuse.patterns.statistics import (
    CENTRED,
    CENTRED_SOURCE,
    EPS,
    EPS_VALUE,
    ROOT,
    SOURCE,
    SPREAD,
    STATISTIC,
    X,
    centred,
    divisor,
    inverse_root,
    mean_square,
    reduced_axes,
    variance,
)
from qfuse.rewrite.pattern import (
    ANY,
    Capture,
    Either,
    Match,
    Maybe,
    Pattern,
    Step,
    V,
    Via,
    check,
    guard,
    let,
    match,
    op,
    through,
)
from qfuse.rewrite.prelude import Miss, MissCode, Node, arguments, aten


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm that was matched.

    Attributes:
        node: Its result.
        x: The value that is normalized, before casts that keep its values.
        weight: The weight that scales the result.
        bias: The bias that is added to it.
        spec: The arithmetic.
        layer: Whether it is a layer norm; otherwise an RMS norm.
        inner: The nodes between ``x`` and the result.
        casts: The casts of ``x`` that keep its values: they may have other users.
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
        """Return the nodes that are dead once another op computes the result."""
        gone = {self.node, *self.inner}
        # A cast of the input may have other users, which keep it alive.
        pending = [c for c in self.casts if c not in gone]
        while found := [c for c in pending if all(user in gone for user in c.users)]:
            gone.update(found)
            pending = [c for c in pending if c not in gone]
        return frozenset(gone)


WEIGHT, BIAS = V("weight", X.dtypes), V("bias", X.dtypes)
CALL = Capture[Node]("call")
FACTOR, PRODUCT = Capture[Node]("factor"), Capture[Node]("product")
# The values along the norm: rounded, scaled by the weight, shifted by the bias, cast at the end.
ROUNDED, SCALED = Capture[Node]("rounded"), Capture[Node]("scaled")
SHIFTED, END = Capture[Node]("shifted"), Capture[Node]("end")
NORM = Capture[Norm]("norm")


def _inner(found: Match) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """Return the nodes from the last captured value down to ``X``, and the casts of ``X``."""
    captured = (found.get(each) for each in (END, SHIFTED, SCALED, ROUNDED, PRODUCT))
    ends = [node for node in captured if node is not None]
    nodes, stack = dict.fromkeys(ends), ends[-1:]
    while stack:
        node = stack.pop()
        source = float_cast_source(node)
        for value in node.all_input_nodes if source is None else [source]:
            if value not in nodes and value is not found[X] and value is not found[EPS]:
                nodes[value] = None
                stack.append(value)
    casts = [node for node in nodes if node not in ends and exact_source(node) is found[X]]
    return tuple(node for node in nodes if node not in casts), tuple(casts)


@guard(MissCode.SHAPE, "the factor changes the shape")
def _keeps_shape(node: Node, x: Node) -> bool:
    return same_shape(shape_of(node), shape_of(x))


@guard(MissCode.DTYPE, "the factor is rounded to {factor.dtype} for a product in {node.dtype}")
def _is_precise(node: Node, factor: Node, source: Node) -> bool:
    # The reference rounds the factor once, to the dtype of the product; a factor narrower than its
    # statistics was rounded before.
    return dtype_of(factor) == dtype_of(node) or widens(dtype_of(source), dtype_of(factor))


@guard(MissCode.AXIS, "mean and variance are not over the same axes")
def _has_axes(spread: Node, centred: Node, centred_source: Node | None) -> bool:
    means = [node_of(arguments(n)["other"]) for n in (centred, centred_source) if n is not None]
    return all(reduced_axes(each) == reduced_axes(spread) for each in means)


@guard(MissCode.DTYPE, "mean and variance are computed in different dtypes")
def _has_types(source: Node, centred: Node, centred_source: Node | None) -> bool:
    nodes = [n for n in (source, centred, centred_source) if n is not None]
    return len({dtype_of(n) for n in nodes}) == 1


@guard(MissCode.PATTERN, "the value divided by the root is centred")
def _is_not_centred(x: Node) -> bool:
    return isinstance(match(_ANY_CENTRED, x), Miss)


def _refuse_operand(match: Match, node: Node, x: Node, operand: Node) -> Miss | None:
    if operand in _inner(match)[0]:
        text = "the norm is multiplied by a part of itself"
        return Miss(MissCode.PATTERN, node, text)
    if not same_shape(shape_of(node), shape_of(x)):
        text = "an operand of shape {} does not broadcast over a norm of shape {}"
        details = tuple(shape_of(operand)), tuple(shape_of(x))
        return Miss(MissCode.SHAPE, operand, text, *details)
    if not shape_of(operand) and dtype_of(operand) != dtype_of(node):
        # Whether torch rounds a scalar to the product's dtype depends on its side of the product.
        text = "a scalar of {} for values of {}"
        types = dtype_name(dtype_of(operand)), dtype_name(dtype_of(node))
        return Miss(MissCode.DTYPE, operand, text, *types)
    return None


def _refuse_weight(match: Match, node: Node, x: Node, weight: Node) -> Miss | None:
    return _refuse_operand(match, node, x, weight)


def _refuse_bias(match: Match, node: Node, x: Node, bias: Node) -> Miss | None:
    if CENTRED not in match:
        text = "the fused RMS norm takes no summand after its weight"
        if same_shape(shape_of(bias), shape_of(node)):
            text = "a residual is added after the norm, and the fused op adds one before it only"
        return Miss(MissCode.PATTERN, node, text)
    return _refuse_operand(match, node, x, bias)


def _written_out(match: Match, node: Node) -> Norm:
    axes = reduced_axes(match[SPREAD])
    assert axes is not None, "the pattern matches only reductions over the last axes"
    spec = NormSpec(
        axes,
        match[EPS_VALUE],
        compute=dtype_of(match[SOURCE]),
        product=dtype_of(match[PRODUCT]),
        rounded=dtype_of(match[ROUNDED]),
        out=dtype_of(node),
        root=match[ROOT],
        statistic=match[STATISTIC],
    )
    inner, casts = _inner(match)
    own = match[X], match.get(WEIGHT), match.get(BIAS), spec, CENTRED in match
    return Norm(node, *own, tuple(n for n in inner if n is not node), casts)


def _one_op(match: Match, node: Node, call: Node, x: Node) -> Norm | Miss:
    a = arguments(call)
    tensor, shape, eps = node_of(a["input"]), sizes_of(a["normalized_shape"]), a["eps"]
    layer, own, out = not is_call(call, aten.rms_norm.default), dtype_of(tensor), dtype_of(node)
    # Torch computes an RMS norm as it is written out, in float32 at least, and casts back.
    wide = own if layer else torch.promote_types(own, torch.float32)
    # torch takes the epsilon of the dtype that it computes in, not that of the input.
    eps = torch.finfo(wide).eps if eps is None else eps
    if not shape or not same_shape(shape, shape_of(tensor)[-len(shape) :]):
        text = "it is over {}, which are not the last axes"
        return Miss(MissCode.SHAPE, call, text, shape)
    if not isinstance(eps, (int, float)) or not 0 <= eps < math.inf:
        return Miss(MissCode.ARGUMENT, call, "eps is {}", eps)
    weight, bias = optional_node(a["weight"]), optional_node(a.get("bias"))
    if not layer and out != own != _promoted(wide, weight):
        # A spec has only one rounding at the end.
        text = "the norm is rounded to {} and then to {}"
        return Miss(MissCode.DTYPE, node, text, dtype_name(own), dtype_name(out))
    statistic = Statistic.WHOLE if layer else Statistic.SQUARES
    spec = NormSpec(len(shape), float(eps), wide, wide, wide, out, statistic=statistic)
    inner = dict.fromkeys(n for n in (match[SHIFTED], call) if n is not node)
    casts = _until(tensor, x)
    return Norm(node, x, weight, bias, spec, layer, tuple(inner), casts)


def _promoted(dtype: torch.dtype, weight: Node | None) -> torch.dtype:
    # A 0-d float weight does not promote.
    if weight is None or not shape_of(weight):
        return dtype
    return torch.promote_types(dtype, dtype_of(weight))


def _until(node: Node, x: Node) -> tuple[Node, ...]:
    casts: list[Node] = []
    while node is not x:
        casts.append(node)
        node = node_of(arguments(node)["self"])
    return tuple(casts)


def _item(node: Node) -> Node | None:
    found = result_of(node)
    return None if found is None else found[0]


@guard(MissCode.PATTERN, "it is a statistic of {call}, not its result")
def _is_result(node: Node) -> bool:
    found = result_of(node)
    return found is not None and found[1] == 0


def _maybe_cast(value: Pattern) -> Pattern:
    return Maybe(Via(value, FLOAT_CAST), value)


def _divided(value: Pattern, spread: Pattern) -> Pattern:
    """Return the pattern of ``value`` divided by the root of ``spread``; match the root first."""
    by, below = (_maybe_cast(f(spread)).named(FACTOR.label) for f in (inverse_root, divisor))
    divided = Either(
        op(aten.mul.Tensor, other=by, self=value), op(aten.div.Tensor, other=below, self=value)
    )
    return divided.named(PRODUCT.label).given(_is_precise)


_INPUT = through(X, EXACT_CAST)
_ANY_CENTRED = centred(CENTRED)
_DEVIATION = Either(variance(_INPUT), mean_square(centred(CENTRED_SOURCE)))
# The layer norm first: its second half has the form of an RMS norm of centred values.
_PRODUCT = Either(
    _divided(centred(CENTRED), _DEVIATION).given(_has_axes, _has_types, _keeps_shape),
    _divided(_INPUT, mean_square(_INPUT)).given(_is_not_centred, _keeps_shape),
)
_ROUNDED = _maybe_cast(_PRODUCT).named(ROUNDED.label)
_SCALED = Maybe(
    op(aten.mul.Tensor, other=WEIGHT, self=_ROUNDED).given(check(_refuse_weight)),
    _ROUNDED,
    plain_first=True,
).named(SCALED.label)
_SHIFTED = Maybe(
    op(aten.add.Tensor, other=BIAS, self=_SCALED).given(check(_refuse_bias)),
    _SCALED,
    plain_first=True,
).named(SHIFTED.label)
_TORCH_NORM = Either(
    op(aten.rms_norm.default, _INPUT, ANY, ANY, ANY).core().named(CALL.label),
    op(aten.layer_norm.default, _INPUT, ANY, ANY, ANY, ANY, ANY).core().named(CALL.label),
    Via(
        op(aten.native_layer_norm.default, _INPUT, ANY, ANY, ANY, ANY).core().named(CALL.label),
        Step("result", _item),
    ).given(_is_result),
).named(SHIFTED.label)

A_NORM = Either(
    _maybe_cast(_TORCH_NORM).given(let(NORM, _one_op)),
    _maybe_cast(_SHIFTED).named(END.label).given(let(NORM, _written_out)),
)
"""A norm with the weight, the bias and the cast after it: ``NORM``.

The users of intermediate values are not checked.
"""
