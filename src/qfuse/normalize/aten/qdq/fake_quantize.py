"""Import fake quantize ops as ``quantize`` followed by ``dequantize``."""

from __future__ import annotations

import torch
from torch.fx.node import Argument

from qfuse.ir.ops import library as ops
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.spec import Arithmetic, Block, QuantSpec, dtype_range
from qfuse.normalize.match.constants import derived, shared_constant
from qfuse.rewrite.pattern import Arg, Capture, Either, Match, Num, PatternRule, V, let, op
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rewriter, aten

X, SCALE, ZERO = V("x", torch.float32), Arg("scale"), Arg("zero_point")
LOW, HIGH, AXIS = Num("low"), Num("high"), Arg("axis")
STORAGE = Capture[torch.dtype]("storage")
PARAMS = Capture["tuple[torch.Tensor, torch.Tensor]"]("params")
_STORAGES = (torch.int8, torch.uint8, torch.int16)


def _storage(node: Node, low: float, high: float) -> torch.dtype | Miss:
    for dtype in _STORAGES:
        least, most = dtype_range(dtype)
        if least <= low <= high <= most:
            return dtype
    text = "no storage dtype has the range [{}, {}]"
    return Miss(MissCode.RANGE, node, text, low, high)


def _known(at: Node, value: Argument) -> torch.Tensor | Miss:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # torch casts the number to float32 before it inverts it.
        dtype = torch.float32 if isinstance(value, float) else torch.int32
        return torch.tensor([value], dtype=dtype)
    known = constant_value(value)
    if known is not None:
        return known
    text = "scale and zero point are computed at run time, and may be out of range"
    return Miss(MissCode.NOT_CONSTANT, value if isinstance(value, Node) else at, text)


def _params(
    node: Node, scale: Argument, zero_point: Argument, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor] | Miss:
    found = [_known(node, value) for value in (scale, zero_point)]
    for each in found:
        if isinstance(each, Miss):
            return each
    known, zero = found
    assert isinstance(known, torch.Tensor), "a miss was returned above"
    assert isinstance(zero, torch.Tensor), "a miss was returned above"
    if known.dtype is not torch.float32 or zero.dtype not in {torch.int32, torch.int64}:
        text = "the scale is {}, the zero point {}: expected float32 and integers"
        return Miss(MissCode.DTYPE, node, text, known.dtype, zero.dtype)
    if not bool(((known > 0) & known.reciprocal().isfinite()).all()):
        return Miss(MissCode.RANGE, node, "a scale is not a positive normal number")
    if not bool(((zero >= low) & (zero <= high)).all()):
        return Miss(MissCode.ZERO_POINT, node, "a zero point is outside of the range")
    return known, zero


def _block(x: Node, axis: Argument) -> Block:
    rank = len(shape_of(x))
    if axis is None:
        return (None,) * rank
    assert isinstance(axis, int), f"not an axis: {axis!r}"
    return tuple(1 if i == axis % rank else None for i in range(rank))


class ImportFakeQuantize(PatternRule):
    """``fake_quantize(x, scale, zero_point)`` becomes ``dequantize(quantize(x))``.

    Before::

        x -> fake_quantize_per_tensor_affine(scale, zero_point, low, high)

    After::

        x -> qfuse.quantize -> qfuse.dequantize

    Exact: both multiply by the reciprocal of the scale in float32, round to even, add the zero
    point, and clamp.

    Refuses: parameters that are computed at run time; float zero points; a scale that is zero or
    has no finite inverse; a range that no storage dtype has; another dtype than float32.
    """

    name = "import-fake-quantize"
    exactness = Exactness.EXACT
    pattern = (
        Either(
            op(
                (
                    aten.fake_quantize_per_tensor_affine.default,
                    aten.fake_quantize_per_tensor_affine.tensor_qparams,
                ),
                X,
                SCALE,
                ZERO,
                LOW,
                HIGH,
            ),
            op(aten.fake_quantize_per_channel_affine.default, X, SCALE, ZERO, AXIS, LOW, HIGH),
        )
        .core()
        .given(let(STORAGE, _storage), let(PARAMS, _params))
    )

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Store the parameters in the rank of the operand, quantize and dequantize."""
        x, axis = site[X], site.get(AXIS)
        block = _block(x, axis)
        shape = [-1 if size == 1 else 1 for size in block]
        if axis is None:
            shape = [1] * len(block)
        scale, zero = site[PARAMS]
        made = _constant(rw, site, SCALE, scale.reshape(shape), "scale")
        point = None
        if bool(zero.any()):
            value = zero.to(torch.int32).reshape(shape)
            point = _constant(rw, site, ZERO, value, "zero_point")
        arithmetic = Arithmetic(torch.float32, reciprocal=True, zero_point_first=False)
        bounds = int(site[LOW]), int(site[HIGH])
        spec = str(QuantSpec(site[STORAGE], *bounds, block, dtype_of(x), arithmetic))
        q = rw.call(ops.quantize, x, made, point, spec)
        rw.replace(site.node, rw.call(ops.dequantize, q, made, point, spec))


def _constant(
    rw: Rewriter, site: Match, of: Capture[Argument], value: torch.Tensor, what: str
) -> Node:
    home = site[of]
    if isinstance(home, Node):
        return derived(rw, home, value, what)
    return shared_constant(rw, site.node, value, f"{site.node.name}_{what}")
