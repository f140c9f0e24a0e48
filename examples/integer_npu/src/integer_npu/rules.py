"""A rule of this backend: a sum between quantized tensors is one op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.activation import Activation
from qfuse.ir.ops.epilogue import Add, Epilogue, Stored
from qfuse.ir.ops.output import Output
from qfuse.ir.ops.qdq import Dequantize, as_dequantize, as_quantize
from qfuse.ir.ops.views import QuantParams, shape_of
from qfuse.ir.sizes import same_shape
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


@dataclass(frozen=True, slots=True)
class AddSite:
    """A quantize of a sum, and the two operands of the sum.

    Attributes:
        node: The quantize.
        params: Its parameters.
        left: The first operand.
        right: The second operand, which is multiplied by ``alpha``.
        alpha: The factor.
    """

    node: Node
    params: QuantParams
    left: Dequantize
    right: Dequantize
    alpha: float


class FuseQuantizedAdd(Rule[AddSite]):
    """``quantize(dequantize(a) + dequantize(b))`` becomes ``qfuse.activation(a, add(b))``.

    Before::

        a -> dequantize --.
                          +-- add -- quantize -- ...
        b -> dequantize --'

    After::

        a, b -> qfuse.activation -- ...

    Refuses: operands that are not dequantized, or are broadcast; parameters that are computed at
    run time, or have two levels; a sum with other users.
    """

    name = "npu-fuse-add"
    anchors: ClassVar[tuple[OpOverload, ...]] = (ops.quantize,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> AddSite | Miss:  # noqa: PLR0911 - one per reason
        """Match a static quantize of a sum of two dequantized tensors."""
        quantize = as_quantize(node)
        assert quantize is not None, "the anchor is a quantize"
        total = quantize.x
        if not is_call(total, aten.add.Tensor):
            return Miss(MissCode.PATTERN, total, "it is not a sum", progress=0)
        a = arguments(total)
        left, right = as_dequantize(a["self"]), as_dequantize(a["other"])
        if left is None or right is None:
            return Miss(MissCode.NOT_QUANTIZED, total, "an operand is not quantized")
        if len(total.users) > 1:
            return Miss(MissCode.SHARED, total, "the sum has other users")
        for params in (quantize.params, left.params, right.params):
            if params.outer_scale is not None:
                return Miss(MissCode.GRANULARITY, node, "scales have two levels")
            if any(constant_of(part) is None for part in params.tensors):
                return Miss(MissCode.NOT_CONSTANT, node, "a scale is computed at run time")
        if not same_shape(shape_of(left.q), shape_of(right.q)):
            return Miss(MissCode.SHAPE, total, "an operand is broadcast")
        alpha = a["alpha"]
        if not isinstance(alpha, (int, float)):
            return Miss(MissCode.ARGUMENT, total, "alpha is computed at run time")
        return AddSite(node, quantize.params, left, right, float(alpha))

    def rewrite(self, site: AddSite, rw: Rewriter) -> None:
        """Insert the op."""
        right = site.right.params
        zero = None if right.zero_point is None else 2
        add = Add(0, site.alpha, Stored(1, zero, right.spec))
        fused = Activation(
            site.node,
            site.left.q,
            site.left.params,
            Epilogue((add,)),
            (site.right.q, *right.tensors),
            Output(site.params),
        )
        call = rw.call(Activation.overload, *fused.call_args())
        rw.replace(site.node, rw.item(call, 0))
