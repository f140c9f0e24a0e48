"""The operands of products, and a product with another one."""

from __future__ import annotations

from qfuse.ir.graph.schema import overload_of
from qfuse.ir.ops.convolution import as_convolution
from qfuse.ir.ops.linear import as_linear
from qfuse.ir.ops.matmul import as_matmul
from qfuse.rewrite.prelude import Node, Rewriter


def operands_of(node: Node) -> tuple[list[Node], Node | None]:
    """Return the activations of a product, and its weight; ``None`` if both are activations."""
    product = as_matmul(node)
    if product is not None:
        return list(dict.fromkeys((product.x, product.other))), None
    layer = as_linear(node) or as_convolution(node)
    assert layer is not None, "the anchor is a product"
    return [layer.x], layer.weight


def replace_operand(rw: Rewriter, product: Node, operand: Node, value: Node) -> None:
    """Multiply ``value`` instead of ``operand``."""
    op = overload_of(product)
    assert op is not None, "a product is a call"
    args = [value if arg is operand else arg for arg in product.args]
    kwargs = {k: value if v is operand else v for k, v in product.kwargs.items()}
    rw.replace(product, rw.call(op, *args, **kwargs))
