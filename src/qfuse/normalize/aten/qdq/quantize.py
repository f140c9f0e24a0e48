"""A quantize written as arithmetic: divide, round, shift, clamp, cast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import REALS
from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.views import dtype_of, node_of, shape_of
from qfuse.ir.quant.spec import Arithmetic, QuantSpec, dtype_name, dtype_range
from qfuse.ir.sizes import same_shape
from qfuse.normalize.aten.qdq.scale_factor import Factor, scale_factor, zero_factor
from qfuse.normalize.importers.rule import RefusedError
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    arguments,
    aten,
)

_CODES = (torch.int8, torch.uint8)
_FULL = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class QuantizeChainSite:
    """The cast that ends a chain, and what the chain says."""

    node: Node
    x: Node
    scale: Factor
    zero: Factor | None
    spec: QuantSpec


@dataclass(frozen=True, slots=True)
class _Chain:
    """The steps between the scaling and the cast.

    Attributes:
        scaled: The quotient or product with the scale.
        zero: What is added: a number, a node or ``None``.
        zero_first: Whether it is added before rounding.
        low: Least code.
        high: Greatest code.
    """

    scaled: Node
    zero: Argument
    zero_first: bool
    low: int
    high: int


class QuantizeChain(Rule[QuantizeChainSite]):
    """``clamp(round(x / scale) + zero_point, low, high)`` cast to 8 bits becomes ``quantize``.

    Before::

        x -> div(scale) -> round -> add(zero_point) -> clamp(low, high) -> cast int8

    After::

        x, scale, zero_point -> qfuse.quantize

    Also with a product by the reciprocal instead of the quotient, with the zero point added before
    rounding, and rounding after clamping to integers, which gives the same codes.

    Exact: the same operations in the same order and type, except that one.

    Refuses: a chain without a clamp, whose cast is undefined outside of the range; bounds that are
    no integers or lie outside of the type; rounding to decimals or down; a constant scale that is
    zero, negative or not finite; a scale that broadcasts ``x``; a reciprocal that no scale has, or
    that is computed at run time; a zero point that is no integer; numbers as scales in 16-bit
    arithmetic, which are rounded there differently from tensors.
    """

    name = "quantize-chain"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten._to_copy.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> QuantizeChainSite | Miss:
        """Match a cast to 8 bits of something clamped and rounded."""
        source = cast_source(node)
        if source is None or dtype_of(node) not in _CODES or not dtype_of(source).is_floating_point:
            text = "it is no cast of a float to 8 bits"
            return Miss(MissCode.DTYPE, node, text, progress=0)
        try:
            chain = _read_chain(node, source)
            return _read(node, chain)
        except RefusedError as refused:
            return refused.miss

    def rewrite(self, site: QuantizeChainSite, rw: Rewriter) -> None:
        """Build the parameters, then the quantize."""
        zero = None if site.zero is None else site.zero.build(rw)
        scale = site.scale.build(rw)
        rw.replace(site.node, rw.call(ops.quantize, site.x, scale, zero, str(site.spec)))


def _read_chain(node: Node, last: Node) -> _Chain:
    """Read the chain backwards from the node that is cast."""
    round_last = is_call(last, aten.round.default)
    clamped = node_of(arguments(last)["self"]) if round_last else last
    low, high = _bounds(node, clamped)
    inner = node_of(arguments(clamped)["self"])
    if round_last:
        scaled, zero = _shift(inner)
        return _Chain(scaled, zero, True, low, high)
    if is_call(inner, aten.round.default):
        scaled, zero = _shift(node_of(arguments(inner)["self"]))
        return _Chain(scaled, zero, True, low, high)
    rounded, zero = _shift(inner)
    if not is_call(rounded, aten.round.default):
        text = "it is clamped and cast, but not rounded"
        raise RefusedError(MissCode.PATTERN, inner, text)
    return _Chain(node_of(arguments(rounded)["self"]), zero, False, low, high)


def _bounds(node: Node, clamped: Node) -> tuple[int, int]:
    """Return the integers that a clamp allows."""
    if not is_call(clamped, aten.clamp.default):
        text = "it is cast without a clamp, which is undefined outside of the range"
        raise RefusedError(MissCode.RANGE, clamped, text)
    a = arguments(clamped)
    least, most = dtype_range(dtype_of(node))
    bounds = []
    for name in ("min", "max"):
        bound = a[name]
        if isinstance(bound, bool) or not isinstance(bound, (int, float)):
            raise RefusedError(MissCode.RANGE, clamped, "its clamp has no {}", name)
        if not least <= bound <= most or bound != int(bound):
            text = "its clamp has {}={}, which is no {}"
            raise RefusedError(
                MissCode.RANGE, clamped, text, name, bound, dtype_name(dtype_of(node))
            )
        bounds.append(int(bound))
    if bounds[0] > bounds[1]:
        raise RefusedError(MissCode.RANGE, clamped, "its clamp is empty: {}", bounds)
    return bounds[0], bounds[1]


def _shift(node: Node) -> tuple[Node, Argument]:
    """Return the summands of a plain addition, the zero point second; or ``node`` and ``None``."""
    if not is_call(node, aten.add.Tensor):
        return node, None
    a = arguments(node)
    if a["alpha"] != 1:
        raise RefusedError(MissCode.ARGUMENT, node, "alpha={} scales a summand", a["alpha"])
    left, right = a["self"], a["other"]
    if isinstance(left, Node) and constant_value(left) is not None and isinstance(right, Node):
        left, right = right, left
    return node_of(left), right


def _read(node: Node, chain: _Chain) -> QuantizeChainSite:
    scaled = chain.scaled
    x, by, divides = _read_scaling(scaled)
    shape, compute = shape_of(x), dtype_of(scaled)
    if not same_shape(shape_of(scaled), shape) or not same_shape(shape_of(node), shape):
        raise RefusedError(MissCode.SHAPE, scaled, "the parameters broadcast what is quantized")
    if dtype_of(node_of(arguments(node)["self"])) != compute:
        raise RefusedError(MissCode.DTYPE, node, "it changes its float type on the way")
    whole = not isinstance(by, Node) or not shape_of(by)
    if compute not in _FULL and whole:
        text = "a number does not act in {} as a scale tensor of that type would"
        raise RefusedError(MissCode.ARITHMETIC, scaled, text, dtype_name(compute))
    divisor = by if divides else _reciprocal_source(by)
    scale, block = scale_factor(scaled, by if divisor is None else divisor, shape, compute, _is_any)
    if divisor is None:
        scale = _inverted(scaled, scale, compute)
    known = scale.value if scale.value is not None else constant_value(scale.home)
    if known is not None and not bool((known > 0).all()):
        raise RefusedError(MissCode.RANGE, scaled, "its scale is zero")
    zero = None
    if chain.zero is not None:
        zero = zero_factor(node, chain.zero, scale.shape, dtype_of(node), _is_any)
    arithmetic = Arithmetic(compute, not divides, chain.zero_first and zero is not None)
    spec = QuantSpec(dtype_of(node), chain.low, chain.high, block, dtype_of(x), arithmetic)
    return QuantizeChainSite(node, x, scale, zero, spec)


def _is_any(param: Node) -> bool:
    """Accept every parameter: what is rounded, clamped and cast to 8 bits is quantized."""
    del param
    return True


def _read_scaling(scaled: Node) -> tuple[Node, Argument, bool]:
    """Return what is scaled, by what, and whether it is divided."""
    divides = is_call(scaled, aten.div.Tensor)
    if not divides and not is_call(scaled, aten.mul.Tensor):
        raise RefusedError(MissCode.PATTERN, scaled, "it is rounded, but not scaled")
    a = arguments(scaled)
    x, by = a["self"], a["other"]
    if not divides and isinstance(by, Node) and _is_parameter(x) and not _is_parameter(by):
        x, by = by, x
    if not isinstance(x, Node) or dtype_of(x) not in REALS:
        raise RefusedError(MissCode.DTYPE, scaled, "what is quantized is no float tensor")
    return x, by, divides


def _is_parameter(value: Argument) -> bool:
    return constant_value(value) is not None or _reciprocal_source(value) is not None


def _reciprocal_source(by: Argument) -> Node | None:
    """Return the scale of ``reciprocal(scale)``, which ``1 / scale`` multiplies by 1."""
    if is_call(by, aten.mul.Tensor):
        a = arguments(node_of(by))
        by = a["self"] if a["other"] == 1 else None
    if not is_call(by, aten.reciprocal.default):
        return None
    return node_of(arguments(node_of(by))["self"])


def _inverted(scaled: Node, factor: Factor, compute: torch.dtype) -> Factor:
    """Return the scale whose reciprocal is the factor of ``scaled``, to the bit."""
    if factor.value is None:
        text = "it is multiplied by the scale, not by its reciprocal"
        raise RefusedError(MissCode.ARITHMETIC, scaled, text)
    value = factor.value.to(compute)
    for dtype in (torch.float32, torch.float64):
        scale = value.to(dtype).reciprocal()
        if torch.equal(scale.reciprocal().to(compute), value):
            return Factor(factor.home, factor.shape, scale, "reciprocal")
    text = "no scale has this factor as its reciprocal"
    raise RefusedError(MissCode.ARITHMETIC, scaled, text)
