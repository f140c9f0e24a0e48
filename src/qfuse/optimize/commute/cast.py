"""Casts: quantize and dequantize can take the dtype of the cast."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from qfuse.ir.dtypes import COMPUTE_DTYPES, widens
from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.qdq import Dequantize, Quantize
from qfuse.ir.ops.views import dtype_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.optimize.commute.base import Commutes, Crossing, given
from qfuse.rewrite.prelude import Miss, MissCode, Node, OpOverload, aten


@dataclass(frozen=True, slots=True)
class CommutingCast(Commutes):
    """A copy that changes only the dtype.

    ``quantize(widen(x))`` is ``quantize(x)``, computed as before. Refuses: a cast that rounds; a
    scale that is chosen from the widened values.

    ``cast(dequantize(q))`` is a dequantize to the dtype of the cast. A dequantize rounds once, to
    its float dtype; where its arithmetic is no wider than that, the rounding is exact, and the
    rounding of the cast can replace it. Other users keep their dequantize. Refuses: a dequantize
    that rounds already; a cast to a dtype that is not a float.

    Normalize handles casts that are adjacent in the source; this covers those that movement made
    adjacent.

    Attributes:
        node: The op.
        source: What it casts.
    """

    ops: ClassVar[tuple[OpOverload, ...]] = (aten._to_copy.default,)

    node: Node
    source: Node

    @classmethod
    def of(cls, node: Node) -> CommutingCast | None:
        """View a pure cast."""
        source = cast_source(node)
        return None if source is None else cls(node, source)

    def lift(self, quantize: Quantize) -> Crossing | Miss:
        """Quantize the operand of the cast, if the cast is exact."""
        params = quantize.params
        narrow, wide = dtype_of(self.source), params.spec.float_dtype
        # 2.503 is 2.5 in bfloat16. With a scale of 1, 2.503 is quantized to 3, and 2.5 to 2.
        if not widens(narrow, wide):
            text = "the cast from {} to {} does not keep every value"
            names = dtype_name(narrow), dtype_name(wide)
            return Miss(MissCode.DTYPE, self.node, text, *names, progress=2)
        # The cast would stay for the choice, and fusions of dynamic quantization look for a choice
        # of the quantize's own operand.
        if any(is_call(user, ops.choose_qparams) for user in self.node.users):
            text = "the scale is chosen from the widened values"
            return Miss(MissCode.SHARED, self.node, text, progress=2)
        spec = replace(params.spec, float_dtype=narrow)
        return Crossing((given(self.source, replace(params, spec=spec)),))

    def sink(self, operands: tuple[Dequantize, ...]) -> Crossing | Miss:
        """Dequantize to the dtype of the cast."""
        (dequantize,) = operands
        params = dequantize.params
        made = dtype_of(self.node)
        # A cast to an integer truncates; a dequantize has no such rounding.
        if made not in COMPUTE_DTYPES:
            text = "a dequantize does not return {}"
            return Miss(MissCode.DTYPE, self.node, text, dtype_name(made), progress=2)
        compute, real = params.spec.arithmetic.compute, params.spec.float_dtype
        # With float32 arithmetic and a bfloat16 result, a cast to float16 rounds the bfloat16
        # number, and a dequantize to float16 would round the float32 number.
        if not widens(compute, real):
            text = "the dequantize rounds from {} to {} already, and two roundings are not one"
            names = dtype_name(compute), dtype_name(real)
            return Miss(MissCode.ARITHMETIC, dequantize.node, text, *names, progress=2)
        spec = replace(params.spec, float_dtype=made)
        return Crossing((given(self.node, replace(params, spec=spec)),))

    def shares_with(self, user: Node) -> bool:
        """Other users keep their dequantize: the cast cost a pass over memory too."""
        del user
        return True
