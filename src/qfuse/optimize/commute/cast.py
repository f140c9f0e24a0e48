"""Casts: quantize converts to the type that it computes in, and dequantize to the type it gives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from qfuse.ir.dtypes import REALS, widens
from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.qdq import Dequantize, Quantize
from qfuse.ir.ops.views import dtype_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.optimize.commute.base import Commutes, Crossing, given
from qfuse.rewrite.prelude import Miss, MissCode, Node, OpOverload, aten


@dataclass(frozen=True, slots=True)
class Cast(Commutes):
    """A copy that changes the type and nothing else.

    ``quantize(widen(x))`` is ``quantize(x)``, computed as before. Refuses: a cast that rounds; one
    that the scale is chosen from, in the wide type.

    ``cast(dequantize(q))`` is a dequantize to the type of the cast. It rounds once, to its float
    type; if that rounding was none, since it computes in no more, the one of the cast can take its
    place. Other users keep their dequantize. Refuses: a dequantize that rounds already; a cast to
    what is not a float type.

    Normalizing does this where the two stand side by side in the source; here movement has brought
    them together.

    Attributes:
        node: The op.
        source: What it casts.
    """

    ops: ClassVar[tuple[OpOverload, ...]] = (aten._to_copy.default,)

    node: Node
    source: Node

    @classmethod
    def of(cls, node: Node) -> Cast | None:
        """View a pure cast."""
        source = cast_source(node)
        return None if source is None else cls(node, source)

    def lift(self, quantize: Quantize) -> Crossing | Miss:
        """Quantize what was cast, if the cast keeps every number."""
        params = quantize.params
        narrow, wide = dtype_of(self.source), params.spec.real
        if not widens(narrow, wide):
            text = "the cast from {} to {} does not keep every number"
            names = dtype_name(narrow), dtype_name(wide)
            return Miss(MissCode.DTYPE, self.node, text, *names, progress=2)
        if any(is_call(user, ops.choose_qparams) for user in self.node.users):
            text = "the scale is chosen from the widened numbers"
            return Miss(MissCode.SHARED, self.node, text, progress=2)
        spec = replace(params.spec, real=narrow)
        return Crossing((given(self.source, replace(params, spec=spec)),))

    def sink(self, operands: tuple[Dequantize, ...]) -> Crossing | Miss:
        """Dequantize to the type of the cast."""
        (dequantize,) = operands
        params = dequantize.params
        made = dtype_of(self.node)
        if made not in REALS:
            text = "a dequantize does not give {}"
            return Miss(MissCode.DTYPE, self.node, text, dtype_name(made), progress=2)
        compute, real = params.spec.arithmetic.compute, params.spec.real
        if not widens(compute, real):
            text = "the dequantize rounds from {} to {} already, and two roundings are not one"
            names = dtype_name(compute), dtype_name(real)
            return Miss(MissCode.ARITHMETIC, dequantize.node, text, *names, progress=2)
        spec = replace(params.spec, real=made)
        return Crossing((given(self.node, replace(params, spec=spec)),))

    def shares_with(self, user: Node) -> bool:
        """Others keep their dequantize: the cast was a pass over memory too."""
        del user
        return True
