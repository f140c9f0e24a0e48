"""A residual branch without a quantize, in a sum whose result is quantized."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from qfuse.analysis.placement.check import LintCheck
from qfuse.analysis.placement.finding import LintFinding
from qfuse.analysis.placement.graph import LintGraph
from qfuse.analysis.placement.operands import encoded, source_of, static
from qfuse.analysis.products import as_product
from qfuse.ir.aten import aten
from qfuse.ir.dtypes import COMPUTE_DTYPES, bit_width
from qfuse.ir.graph.schema import arguments, is_call, overload_of
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.ops.constants import is_constant_expression
from qfuse.ir.ops.qdq import as_quantize
from qfuse.ir.ops.views import dtype_of, shape_of, tensor_of
from qfuse.ir.sizes import same_shape

_MOST = 8


class FloatResidual(LintCheck):
    """A quantized product plus a float tensor, and the sum is quantized with static parameters.

    The product's kernel reads the tensor in float, and another op has to write it in float. Sums
    that stay in float, such as the residual stream in front of a norm, are not reported.
    """

    code = "float-residual"

    def find(self, graph: LintGraph) -> Iterator[LintFinding]:
        """Look at every sum of two tensors."""
        for node in graph.normal.graph.nodes:
            if not is_call(node, aten.add.Tensor):
                continue
            a = arguments(node)
            sides = (a["self"], a["other"])
            for product, branch in (sides, sides[::-1]):
                if isinstance(product, Node) and isinstance(branch, Node) and product is not branch:
                    found = self._check(graph, node, product, branch)
                    if found is not None:
                        yield found
                        break

    def _check(
        self, graph: LintGraph, node: Node, product: Node, branch: Node
    ) -> LintFinding | None:
        if not _is_quantized_product(product) or not _is_float(branch, node):
            return None
        if not _is_quantized_below(node):
            return None
        bits = bit_width(dtype_of(branch))
        float_us = graph.pass_us(branch, [bits], [bits], calls=False)
        saved = float_us - graph.pass_us(branch, [8], [8], calls=False)
        what = op_name(branch)
        shape = "x".join(map(str, shape_of(branch)))
        return self.finding(
            node,
            f"a quantized {op_name(_root(product))} is added to the float result of {what} "
            f"({shape}), and the sum is quantized",
            f"quantize the result of {what} before this sum, with static parameters",
            saved,
            branch=what,
            bits=bits,
        )


def _root(node: Node) -> Node:
    while (source := source_of(node)) is not None:
        node = source
    return node


def _is_quantized_product(node: Node) -> bool:
    """Whether ``node`` is a product of two dequantized operands that only its sum uses."""
    if len(node.users) != 1:
        return False
    product = as_product(_root(node))
    if product is None or len(product.node.users) != 1:
        return False
    return encoded(product.x) is not None and encoded(product.other) is not None


def _is_float(branch: Node, total: Node) -> bool:
    """Whether ``branch`` is a float activation of the shape of the sum."""
    if not isinstance(branch.meta.get("val"), torch.Tensor):
        return False
    if dtype_of(branch) not in COMPUTE_DTYPES or not same_shape(shape_of(branch), shape_of(total)):
        return False
    return encoded(branch) is None and not is_constant_expression(branch)


def _is_quantized_below(node: Node) -> bool:
    """Whether the first op below that is not an activation quantizes with static parameters."""
    here = node
    for _ in range(_MOST):
        quantizes = [op for user in here.users if (op := as_quantize(user)) is not None]
        if quantizes:
            return any(static(op.params) for op in quantizes)
        if len(here.users) != 1:
            return False
        (user,) = here.users
        if not _is_activation(user):
            return False
        here = user
    return False


def _is_activation(node: Node) -> bool:
    if source_of(node) is not None:
        return True
    op = overload_of(node)
    pointwise = op is not None and torch.Tag.pointwise in op.tags
    return pointwise and len(node.all_input_nodes) == 1 and tensor_of(node).is_floating_point()
