"""Dequantize to the type that is read, not to another one first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from qfuse.ir.dtypes import REALS, widens
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.ir.ops.views import dtype_of, tensor_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.optimize.propagate.sink_dequantize import refuse_sunk
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule


@dataclass(frozen=True, slots=True)
class SinkBelowCastSite:
    """A cast, and the dequantize that it reads."""

    node: Node
    dequantize: Dequantize


class SinkBelowCast(Rule[SinkBelowCastSite]):
    """``cast(dequantize(q))`` becomes a dequantize to the type of the cast.

    Before::

        q -> dequantize to float32, in float32 -> _to_copy(bfloat16) -> ...

    After::

        q -> dequantize to bfloat16, in float32 -> ...

    Dequantize rounds once, to its real type. If that rounding was none, since it computes in no
    more, the one of the cast can take its place; a cast that widens rounds nothing. Normalizing
    does this where the two stand side by side in the source; here movement has brought them
    together. Other readers keep their dequantize.

    Refuses: a dequantize that rounds already; a cast to what is no real type; other strides.
    """

    name = "sink-below-cast"
    anchors: ClassVar[tuple[OpOverload, ...]] = (torch.ops.aten._to_copy.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> SinkBelowCastSite | Miss:
        """Match a pure cast of a dequantize that does not round."""
        dequantize = as_dequantize(cast_source(node))
        if dequantize is None:
            return Miss(MissCode.PATTERN, node, "it does not cast a dequantize", progress=0)
        if dtype_of(node) not in REALS:
            text = "a dequantize does not give {}"
            return Miss(MissCode.DTYPE, node, text, dtype_name(dtype_of(node)), progress=2)
        spec = dequantize.params.spec
        if not widens(spec.arithmetic.compute, spec.real):
            text = "the dequantize rounds from {} to {} already, and two roundings are not one"
            names = dtype_name(spec.arithmetic.compute), dtype_name(spec.real)
            return Miss(MissCode.ARITHMETIC, dequantize.node, text, *names, progress=2)
        wrong = refuse_sunk(node, tensor_of(dequantize.q))
        return wrong or SinkBelowCastSite(node, dequantize)

    def rewrite(self, site: SinkBelowCastSite, rw: Rewriter) -> None:
        """Dequantize to the type of the cast."""
        params = site.dequantize.params
        spec = replace(params.spec, real=dtype_of(site.node))
        made = replace(params, spec=spec)
        rw.replace(site.node, rw.call(ops.dequantize, *made.call_args(site.dequantize.q)))
