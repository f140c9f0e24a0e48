"""Quantize the numbers themselves, not their widened copies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from qfuse.ir.dtypes import widens
from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.qdq import Quantize, as_quantize
from qfuse.ir.ops.views import dtype_of, tensor_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.optimize.propagate.lift_quantize import refuse_layout
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule


@dataclass(frozen=True, slots=True)
class LiftAboveCastSite:
    """A quantize, and what the cast that it reads widens."""

    quantize: Quantize
    source: Node


class LiftAboveCast(Rule[LiftAboveCastSite]):
    """``quantize(widen(x))`` becomes ``quantize(x)``, computed as before.

    Before::

        x: bfloat16 -> _to_copy(float32) -> quantize, in float32 -> ...

    After::

        x: bfloat16 -> quantize, in float32 -> ...

    Quantize converts to the type that it computes in, and a number that was widened before is the
    same number there. Normalizing does this where the two stand side by side in the source; here
    movement has brought them together.

    Refuses: a cast that rounds, or to and from what is no real type; a cast that the scale is
    chosen from, in the wide type; stored numbers that leave the graph with other strides.
    """

    name = "lift-above-cast"
    anchors: ClassVar[tuple[OpOverload, ...]] = (ops.quantize,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> LiftAboveCastSite | Miss:
        """Match a quantize of a cast that keeps every number."""
        quantize = as_quantize(node)
        assert quantize is not None, "the anchor is a quantize"
        source = cast_source(quantize.x)
        if source is None:
            return Miss(MissCode.PATTERN, node, "it does not quantize a cast", progress=0)
        narrow, wide = dtype_of(source), quantize.params.spec.real
        if not widens(narrow, wide):
            text = "the cast from {} to {} does not keep every number"
            names = dtype_name(narrow), dtype_name(wide)
            return Miss(MissCode.DTYPE, quantize.x, text, *names, progress=2)
        if any(is_call(user, ops.choose_qparams) for user in quantize.x.users):
            text = "the scale is chosen from the widened numbers"
            return Miss(MissCode.SHARED, quantize.x, text, progress=2)
        with torch.no_grad():
            q = torch.empty_like(tensor_of(source), dtype=quantize.params.spec.dtype)
        return refuse_layout(node, q, moves=False) or LiftAboveCastSite(quantize, source)

    def rewrite(self, site: LiftAboveCastSite, rw: Rewriter) -> None:
        """Quantize what was cast."""
        params = site.quantize.params
        spec = replace(params.spec, real=dtype_of(site.source))
        made = replace(params, spec=spec)
        rw.replace(site.quantize.node, rw.call(ops.quantize, *made.call_args(site.source)))
