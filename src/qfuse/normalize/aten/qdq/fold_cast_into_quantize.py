"""Fold a widening cast into the quantize of its result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from qfuse.ir.dtypes import widens
from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.qdq import Quantize, as_quantize
from qfuse.ir.ops.views import dtype_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule


@dataclass(frozen=True, slots=True)
class QuantizeOfCast:
    """A quantize, and the operand of the cast before it."""

    quantize: Quantize
    source: Node


class FoldCastIntoQuantize(Rule[QuantizeOfCast]):
    """``quantize(widen(x))`` becomes a quantize of ``x``.

    Before::

        x: bfloat16 -> _to_copy(dtype=float32) -> quantize, in float32

    After::

        x: bfloat16 -> quantize, in float32

    Refuses: a cast that rounds; a cast of quantized values, integers or float8; a scale that is
    chosen from the cast, since the choice computes in the wide dtype, and both must have the same
    operand to be fused.
    """

    name = "fold-cast-into-quantize"
    anchors: ClassVar[tuple[OpOverload, ...]] = (ops.quantize,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> QuantizeOfCast | Miss:
        """Match a quantize of a cast."""
        quantize = as_quantize(node)
        assert quantize is not None, "the anchor is a quantize"
        source = cast_source(quantize.x)
        if source is None:
            return Miss(MissCode.PATTERN, node, "its operand is not a cast", progress=0)
        narrow, wide = dtype_of(source), quantize.params.spec.float_dtype
        # Also false for integers and float8, which may be quantized values themselves.
        if not widens(narrow, wide):
            text = "the cast from {} to {} is not exact"
            names = dtype_name(narrow), dtype_name(wide)
            return Miss(MissCode.DTYPE, quantize.x, text, *names, progress=2)
        if any(is_call(user, ops.choose_qparams) for user in quantize.x.users):
            text = "the scale is chosen from the widened tensor"
            return Miss(MissCode.SHARED, quantize.x, text, progress=2)
        return QuantizeOfCast(quantize, source)

    def rewrite(self, site: QuantizeOfCast, rw: Rewriter) -> None:
        """Quantize the operand of the cast; the arithmetic stays in the wide dtype."""
        params = site.quantize.params
        spec = replace(params.spec, float_dtype=dtype_of(site.source))
        args = replace(params, spec=spec).call_args(site.source)
        rw.replace(site.quantize.node, rw.call(ops.quantize, *args))
