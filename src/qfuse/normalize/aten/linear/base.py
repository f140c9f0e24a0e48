"""What the rules that respell a matrix product as ``aten.linear`` have in common."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass

from torch.fx.node import Argument

from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.view_ops import SIZED_VIEWS
from qfuse.ir.ops.views import dtype_of, node_of, shape_of
from qfuse.ir.sizes import same_shape, same_size
from qfuse.normalize.aten.linear.weights import call_linear, is_weight, transposed
from qfuse.normalize.match.constants import derived
from qfuse.rewrite.prelude import Miss, MissCode, Node, Rewriter, Rule, arguments, aten

_MATRIX = 2


@dataclass(frozen=True, slots=True)
class ProductSite:
    """A product of an activation and a weight.

    Attributes:
        node: The product.
        x: Activation of shape ``[..., K]``.
        weight: Weight of shape ``[N, K]`` if ``rows``, else ``[K, N]``.
        bias: Of shape ``[N]``, or with ones in front.
        rows: Whether a row of the weight makes an output feature.
    """

    node: Node
    x: Node
    weight: Node
    bias: Node | None = None
    rows: bool = False


class LinearFrom(Rule[ProductSite], ABC):
    """Replaces a product by ``aten.linear``; a subclass says what it matches.

    The new call multiplies and sums the same numbers: what differs between the subclasses is
    whether it also ends in the same call of the library.
    """

    def rewrite(self, site: ProductSite, rw: Rewriter) -> None:
        """Build the weight as ``[N, K]`` and the bias as ``[N]``."""
        weight = site.weight if site.rows else transposed(rw, site.weight)
        bias = None if site.bias is None else _flat(rw, site.bias)
        rw.replace(site.node, call_linear(rw, site.x, weight, bias))


def not_a_linear(weight: Node) -> Miss | None:
    """Refuse a product of two activations, which is no linear and is left as it is."""
    if is_weight(weight):
        return None
    text = "both factors are computed at run time"
    return Miss(MissCode.NOT_CONSTANT, weight, text, progress=0)


def spread_refusal(node: Node, x: Node, weight: Node, axis: int) -> Miss | None:
    """Refuse a contraction of axes of different sizes: one of them has one element, and is spread.

    Args:
        node: The product.
        x: The activation, of which the last axis is contracted.
        weight: The weight.
        axis: The axis of the weight that is contracted.
    """
    mine, other = shape_of(x)[-1], shape_of(weight)[axis]
    if same_size(mine, other):
        return None
    text = "it spreads the one element of an axis over the other: {} and {}"
    return Miss(MissCode.SHAPE, node, text, mine, other, progress=2)


def scaling_refusal(node: Node) -> Miss | None:
    """Refuse ``beta * bias + alpha * product`` unless both factors are 1."""
    a = arguments(node)
    for name in ("alpha", "beta"):
        if a[name] != 1:
            text = "{}={} scales a part of the sum"
            return Miss(MissCode.ARGUMENT, node, text, name, a[name], progress=2)
    return None


def bias_refusal(node: Node, bias: Node) -> Miss | None:
    """Refuse a summand of ``node`` that is not one number per output feature."""
    shape = shape_of(bias)
    if not shape or not same_shape(shape, (*(1,) * (len(shape) - 1), shape_of(node)[-1])):
        text = "a summand of shape {} is not a bias of {} features"
        return Miss(MissCode.SHAPE, bias, text, shape, shape_of(node)[-1], progress=2)
    if dtype_of(bias) != dtype_of(node):
        text = "the bias is {}, the product {}"
        return Miss(MissCode.DTYPE, bias, text, dtype_of(bias), dtype_of(node), progress=2)
    return None


def shared_matrix(batched: Argument) -> Node | None:
    """Return the matrix that is every batch entry of ``batched``, or ``None``."""
    node = node_of(batched)
    last = shape_of(node)[-_MATRIX:]
    while len(shape_of(node)) > _MATRIX:
        if not is_call(
            node, *SIZED_VIEWS, aten.unsqueeze.default, aten.expand.default, aten.clone.default
        ):
            return None
        source = node_of(arguments(node)["self"])
        shape = shape_of(source)
        if len(shape) < _MATRIX or not same_shape(shape[-_MATRIX:], last):
            return None
        node = source
    return node


def _flat(rw: Rewriter, bias: Node) -> Node:
    """Return ``bias`` of shape ``[N]`` or ``[1, .., N]`` as ``[N]``."""
    shape = shape_of(bias)
    if len(shape) == 1:
        return bias
    value = constant_of(bias)
    if value is not None:
        return derived(rw, bias, value.reshape(-1), "flat")
    return rw.call(aten.view.default, bias, [-1])
