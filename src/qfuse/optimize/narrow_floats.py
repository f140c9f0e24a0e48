"""Run the float products that are left in bfloat16, on request: this loses precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch.fx.node import map_arg

from qfuse.ir.events import Exactness, Fired
from qfuse.ir.program import constant_of, place_of
from qfuse.ir.schema import is_call, overload_of
from qfuse.rewrite.driver import Context, PassResult
from qfuse.rewrite.rewriter import GraphEditor
from qfuse.rewrite.whole import Pass

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.fx import Node

    from qfuse.ir.program import StageGraph
    from qfuse.rewrite.rewriter import Rewriter

__all__ = ["NarrowFloats"]

_aten = torch.ops.aten
_PRODUCTS: tuple[OpOverload, ...] = (
    _aten.linear.default,
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.matmul.default,
    _aten.convolution.default,
    _aten.conv1d.default,
    _aten.conv2d.default,
    _aten.conv3d.default,
    _aten.scaled_dot_product_attention.default,
)


class NarrowFloats(Pass):
    """Cast the operands of float32 products to bfloat16, and their results back.

    Softmax, norms and residual sums stay in float32, as under autocast. Quantized ops are not
    touched: their stored numbers say how precise they are. A product that already computes in
    another type is left alone.
    """

    name: ClassVar[str] = "narrow-floats"
    exactness = Exactness.LOSSY

    def run(self, program: StageGraph, context: Context) -> PassResult:
        """Narrow every product, in one sweep."""
        result = PassResult()
        editor = GraphEditor(program.module)
        for node in list(program.graph.nodes):
            key = f"{context.room}/{self.name}@{node.name}"
            if not _is_float32_product(node) or not context.gate.allows(key):
                continue
            place = place_of(node)
            rw = editor.rewriter(self.name, node)
            rw.replace(node, _narrow(node, rw))
            rw.commit()
            program.log.add(Fired(context.room, self.name, key, self.exactness, (place,)))
            result.fired[self.name] += 1
        return result


def _is_float32_product(node: Node) -> bool:
    if not is_call(node, *_PRODUCTS):
        return False
    types = {n.meta["val"].dtype for n in node.all_input_nodes if _is_real(n)}
    return types == {torch.float32} and node.meta["val"].dtype is torch.float32


def _is_real(node: Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _narrow(node: Node, rw: Rewriter) -> Node:
    casts = {n: _cast(n, rw) for n in dict.fromkeys(node.all_input_nodes) if _is_real(n)}
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: casts.get(n, n))
    op = overload_of(node)
    assert op is not None, "a product is a call of an op"
    product = rw.call(op, *args, **kwargs)
    return rw.call(_aten._to_copy.default, product, dtype=torch.float32)


def _cast(node: Node, rw: Rewriter) -> Node:
    value = constant_of(node)
    if value is not None:
        return rw.constant(value.to(torch.bfloat16), f"{node.target}_bfloat16")
    return rw.call(_aten._to_copy.default, node, dtype=torch.bfloat16)
