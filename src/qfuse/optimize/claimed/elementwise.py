"""Fuse a sum, difference or product of dequantized tensors, for backends that claim it."""

from __future__ import annotations

from typing import ClassVar

from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.claimed.elementwise import Elementwise, ElementwiseKind, ElementwiseSpec
from qfuse.ir.ops.epilogue import Epilogue
from qfuse.ir.ops.views import QuantParams, dtype_of, shape_of
from qfuse.optimize.claimed.site import BetweenSite, with_quantize_behind
from qfuse.optimize.fuse.operands import stored_edge
from qfuse.patterns.activations import ACTIVATION_OPS, activated, activation_of
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


class FuseElementwise(Rule[BetweenSite]):
    """``quantize(dequantize(a) + dequantize(b))`` becomes ``qfuse.elementwise(a, b)``.

    Before::

        a -> dequantize --.
        b -> dequantize --+-- add -- quantize -- ...

    After::

        a, b -> qfuse.elementwise -- ...

    Likewise differences and products, and numbers as second operands. An activation after it is
    part of the op. One operand may be float, and the result is float if it is not quantized, or has
    other users. It is fused only for a backend that claims ``qfuse.elementwise``.

    Refuses: operands of which none is quantized, or of several float dtypes; numbers that are
    computed at run time; an operand without axes, which does not take part in type promotion.
    """

    name = "fuse-elementwise"
    anchors: ClassVar[tuple[OpOverload, ...]] = (
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.mul.Tensor,
    )
    exactness = Exactness.EXACT

    def match(self, node: Node) -> BetweenSite | Miss:
        """Match an op that reads at least one dequantized tensor."""
        a = arguments(node)
        x, other, alpha = a["self"], a["other"], a.get("alpha", 1)
        if not isinstance(x, Node) or not isinstance(alpha, (int, float)):
            return Miss(MissCode.ARGUMENT, node, "a number is computed at run time", progress=0)
        stored, params = stored_edge(x)
        second: tuple[Node | None, QuantParams | None] = (None, None)
        if isinstance(other, Node):
            second = stored_edge(other)
        if params is None and second[1] is None:
            return Miss(MissCode.NOT_QUANTIZED, node, "no operand is quantized", progress=0)
        if second[0] is None and (isinstance(other, bool) or not isinstance(other, (int, float))):
            return Miss(MissCode.ARGUMENT, node, "a number is computed at run time", progress=1)
        both = [each for each in (x, other) if isinstance(each, Node)]
        if any(dtype_of(each) != dtype_of(node) or not shape_of(each) for each in both):
            text = "its operands and its result have several dtypes, or an operand has no axis"
            return Miss(MissCode.DTYPE, node, text, progress=1)
        number = float(other) if isinstance(other, (int, float)) else None
        spec = ElementwiseSpec(_kind(node), float(alpha), number)
        end, epilogue = _activation_behind(node)
        fused = Elementwise(node, stored, params, second[0], second[1], None, spec, epilogue)
        return with_quantize_behind(fused, end)

    def rewrite(self, site: BetweenSite, rw: Rewriter) -> None:
        """Insert the op."""
        site.insert(rw)


def _activation_behind(node: Node) -> tuple[Node, Epilogue]:
    """Return the activation that is the only user of ``node``, as an epilogue, or ``node``."""
    user = next(iter(node.users)) if len(node.users) == 1 else node
    if not is_call(user, *ACTIVATION_OPS) or activated(user) is not node:
        return node, Epilogue()
    act = activation_of(user)
    return (node, Epilogue()) if act is None else (user, Epilogue((act,)))


def _kind(node: Node) -> ElementwiseKind:
    if is_call(node, aten.mul.Tensor):
        return ElementwiseKind.MUL
    return ElementwiseKind.ADD if is_call(node, aten.add.Tensor) else ElementwiseKind.SUB
