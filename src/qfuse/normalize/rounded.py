"""Fake quantization that is written out: values rounded to integers that stay in float."""

from __future__ import annotations

from collections.abc import Sequence

from qfuse.ir.dtypes import COMPUTE_DTYPES
from qfuse.ir.events import Missed
from qfuse.ir.graph.schema import arguments, is_call, overload_of
from qfuse.ir.graph.stage_graph import NormalGraph, place_of
from qfuse.ir.ops.convolution import as_convolution
from qfuse.ir.ops.linear import as_linear
from qfuse.ir.ops.matmul import as_matmul
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import dtype_of
from qfuse.patterns.quantized_operand import moved_operand
from qfuse.rewrite.prelude import MissCode, Node, aten

_RULE = "quantize-chain"
_REASON = "the rounded values stay in {}: expected a cast to int8 or uint8 after aten.{}"
# After the scale, the rounding and the clamp of a pattern; only the cast is missing.
_PROGRESS = 4
_SCALES = (aten.mul.Tensor, aten.div.Tensor)
_SHIFTS = (aten.add.Tensor, aten.sub.Tensor)


def log_rounded(program: NormalGraph, stage: str) -> None:
    """Log every chain of divide, round, clamp and multiply in which no value is cast to 8 bits.

    The last op may be the product of a layer or matmul, which is scaled in place of its operand.

    No rule is tried there, since those for quantization begin at the cast.
    """
    logged: set[Node] = set()
    for node in program.graph.nodes:
        for codes in filter(None, map(_codes, _read_by(node))):
            if codes in logged:
                continue
            logged.add(codes)
            name = str(codes.target).split(".")[1]
            reason = _REASON.format(str(dtype_of(codes)).removeprefix("torch."), name)
            place = place_of(codes)
            program.log.add(Missed(stage, _RULE, MissCode.DTYPE, reason, place, place, _PROGRESS))


def _read_by(node: Node) -> Sequence[object]:
    """Return the operands of ``node`` that may be rounded values which are scaled later."""
    if is_call(node, *_SCALES):
        return (arguments(node)["self"],) if dtype_of(node) in COMPUTE_DTYPES else ()
    layer, product = as_linear(node) or as_convolution(node), as_matmul(node)
    if layer is not None:
        is_stored = as_dequantize(moved_operand(layer.weight)[1]) is not None
        return (moved_operand(layer.x)[1],) if is_stored else ()
    operands = () if product is None else (product.x, product.other)
    return [moved_operand(operand)[1] for operand in operands]


def _codes(value: object) -> Node | None:
    """Return the last op that rounds or clamps ``value``, before a zero point is subtracted."""
    codes = _summand(value)
    first = is_call(codes, aten.round.default)
    # Bounds that are integers may come before rounding or after it.
    clamp = _source(codes) if first else codes
    rounded = codes if first else _summand(_source(codes))
    if clamp is None or not is_call(clamp, aten.clamp.default) or not _is_range(clamp):
        return None
    if not is_call(rounded, aten.round.default):
        return None
    scaled = _summand(_source(clamp if first else rounded))
    return codes if is_call(scaled, *_SCALES) else None


def _source(node: object) -> Node | None:
    """Return the operand of a call of ATen, or ``None``."""
    # A getitem, or arithmetic of sizes, has no schema.
    if not isinstance(node, Node) or overload_of(node) is None:
        return None
    source = arguments(node).get("self")
    return source if isinstance(source, Node) else None


def _summand(value: object) -> Node | None:
    """Return what a sum or difference begins with, if ``value`` is one, or else ``value``."""
    node = value if isinstance(value, Node) else None
    return _source(node) if is_call(node, *_SHIFTS) else node


def _is_range(clamp: Node) -> bool:
    """Whether the bounds are integers, as those of quantized values are."""
    bounds = arguments(clamp)["min"], arguments(clamp)["max"]
    return all(isinstance(each, (int, float)) and float(each).is_integer() for each in bounds)
