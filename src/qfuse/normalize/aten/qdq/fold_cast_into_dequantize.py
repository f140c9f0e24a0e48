"""Fold the cast of a dequantize's result into the dequantize."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from qfuse.ir.dtypes import COMPUTE_DTYPES
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.ir.ops.views import dtype_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule


@dataclass(frozen=True, slots=True)
class CastOfDequantize:
    """A cast, and the dequantize that is its operand."""

    node: Node
    dequantize: Dequantize


class FoldCastIntoDequantize(Rule[CastOfDequantize]):
    """``cast(dequantize(q))`` becomes a dequantize to the dtype of the cast.

    Before, as autocast leaves it::

        q -> dequantize to float32, in float32 -> _to_copy(dtype=bfloat16)

    After::

        q -> dequantize to bfloat16, in float32

    The canonical dequantize computes in its own dtype and rounds once to its float dtype, so the
    two are one if that first rounding is exact. Other users keep their dequantize.

    Refuses: a dequantize that rounds already, since two roundings are not one; a cast to a dtype
    that is not a float.
    """

    name = "fold-cast-into-dequantize"
    anchors: ClassVar[tuple[OpOverload, ...]] = (torch.ops.aten._to_copy.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> CastOfDequantize | Miss:
        """Match a pure cast to a float dtype."""
        dequantize = as_dequantize(cast_source(node))
        if dequantize is None:
            return Miss(MissCode.PATTERN, node, "it is not a cast of a dequantize", progress=0)
        spec = dequantize.params.spec
        if dtype_of(node) not in COMPUTE_DTYPES:
            text = "a dequantize does not return {}"
            return Miss(MissCode.DTYPE, node, text, dtype_name(dtype_of(node)), progress=2)
        # From float32 to bfloat16 to float16 a value may be rounded to another neighbour than
        # directly.
        if torch.promote_types(spec.arithmetic.compute, spec.float_dtype) != spec.float_dtype:
            text = "the dequantize rounds from {} to {} already, and two roundings are not one"
            names = dtype_name(spec.arithmetic.compute), dtype_name(spec.float_dtype)
            return Miss(MissCode.ARITHMETIC, dequantize.node, text, *names, progress=2)
        return CastOfDequantize(node, dequantize)

    def rewrite(self, site: CastOfDequantize, rw: Rewriter) -> None:
        """Add another dequantize, to the dtype of the cast."""
        params = site.dequantize.params
        spec = replace(params.spec, float_dtype=dtype_of(site.node))
        args = replace(params, spec=spec).call_args(site.dequantize.q)
        rw.replace(site.node, rw.call(ops.dequantize, *args))
