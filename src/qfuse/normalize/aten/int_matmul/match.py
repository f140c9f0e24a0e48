"""Products of stored integers, in every spelling that sums them exactly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx.node import Argument

from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.views import dtype_of, node_of, shape_of
from qfuse.normalize.match.constants import derived
from qfuse.normalize.match.quantized_values import difference, moved_constant
from qfuse.normalize.match.views import transpose_source
from qfuse.rewrite.prelude import Node, Rewriter, arguments, aten

_MATRIX = 2
_STEPS = 8

EIGHT_BITS = (torch.int8, torch.uint8)
_SUMS = (torch.int32, torch.int64)
_WIDER = (torch.int16, *_SUMS)
_WIDE_FLOATS = (torch.float32, torch.float64)
# That many 8-bit terms have an exact sum in float32, whatever the order.
_EXACT_TERMS = 1 << 16


@dataclass(frozen=True, slots=True)
class IntProduct:
    """``(x - zero) @ weight`` in integers.

    Attributes:
        node: The product, ``int32`` or ``int64``.
        x: 8-bit activation of shape ``[..., K]``.
        zero: What is subtracted from it first: a node, a number, or ``None``.
        weight: The constant that holds the 8-bit weight.
        rows: Whether its shape is ``[N, K]``; otherwise it is ``[K, N]``.
    """

    node: Node
    x: Node
    zero: Argument
    weight: Node
    rows: bool

    def weight_rows(self, rw: Rewriter) -> Node:
        """Return the weight as a constant of shape ``[N, K]``."""
        if self.rows:
            return self.weight
        moved = moved_constant(self.weight)
        assert moved is not None, "the weight is a constant"
        return derived(rw, self.weight, moved[1].t(), "t")


def as_int_product(value: object) -> IntProduct | None:
    """View ``value`` as the product of an 8-bit activation and a constant 8-bit weight."""
    if not isinstance(value, Node) or not is_call(
        value, aten.mm.default, aten._int_mm.default, aten.matmul.default
    ):
        return None
    a = arguments(value)
    left, right = node_of(a["self"]), node_of(a["other"] if "other" in a else a["mat2"])
    if dtype_of(value) not in _SUMS or len(shape_of(right)) != _MATRIX or not shape_of(left):
        return None
    weight = _constant_behind(right)
    if weight is None:
        return None
    # A difference of 8-bit numbers in 8 bits wraps, so it is an activation of its own.
    shifted = None if dtype_of(left) in EIGHT_BITS else difference(left)
    zero = None
    if shifted is not None:
        left, zero = shifted
    x = integers_behind(left)
    return None if x is None else IntProduct(value, x, zero, *weight)


def integers_behind(node: Node) -> Node | None:
    """Look through widening casts to a node of 8-bit integers."""
    for _ in range(_STEPS):
        if dtype_of(node) in EIGHT_BITS:
            return node
        # A cast to bool, and back, is no number of the source.
        if dtype_of(node) not in _WIDER or not is_call(node, aten._to_copy.default):
            return None
        node = node_of(arguments(node)["self"])
    return None


def column_sum(value: object, product: IntProduct) -> bool:
    """Whether ``value`` is the sum of the product's weight over K, per output feature.

    It may be a reduction in the graph, wide enough not to wrap, or a constant that was summed
    before.
    """
    if not isinstance(value, Node):
        return False
    moved = moved_constant(value)
    if moved is not None:
        return _is_sum(moved[1], product)
    if not is_call(value, aten.sum.dim_IntList):
        return False
    a = arguments(value)
    dims, weight = a["dim"], _constant_behind(node_of(a["self"]), floats=True)
    if (
        weight is None
        or weight[0].target != product.weight.target
        or a["dtype"] not in {None, *_SUMS, *_WIDE_FLOATS}
        or not isinstance(dims, (list, tuple))
        or any(size > _EXACT_TERMS for size in shape_of(product.weight))
    ):
        return False
    # Of [N, K] the sum goes over axis 1, of [K, N] over axis 0.
    k_axis = 1 if weight[1] != product.rows else 0
    return [d % _MATRIX for d in dims if isinstance(d, int)] == [k_axis]


def _is_sum(value: torch.Tensor, product: IntProduct) -> bool:
    known = moved_constant(product.weight)
    if known is None or value.is_meta or known[1].is_meta:
        return False
    summed = known[1].sum(1 if product.rows else 0, dtype=torch.int64)
    return value.numel() == summed.numel() and torch.equal(
        value.reshape(-1).double(), summed.double()
    )


def _constant_behind(node: Node, *, floats: bool = False) -> tuple[Node, bool] | None:
    """Look through casts, copies and transposes of a ``[K, N]`` factor to its 8-bit constant.

    Args:
        node: The factor.
        floats: Whether casts to wide float types count.

    Returns:
        The constant, and whether its shape is ``[N, K]``.
    """
    rows = False
    for _ in range(_STEPS):
        if node.op == "get_attr":
            known = constant_of(node) is not None and dtype_of(node) in EIGHT_BITS
            return (node, rows) if known else None
        source = transpose_source(node)
        if source is not None:
            node, rows = source, not rows
        elif _keeps_values(node, floats=floats):
            node = node_of(arguments(node)["self"])
        else:
            return None
    return None


def _keeps_values(node: Node, *, floats: bool) -> bool:
    """Whether ``node`` is a copy, or a cast of 8-bit integers to a wider type."""
    if is_call(node, aten.clone.default, aten.alias.default):
        return True
    if not is_call(node, aten._to_copy.default):
        return False
    dtype = dtype_of(node)
    if dtype.is_floating_point:
        return floats and dtype in _WIDE_FLOATS
    # A cast from one 8-bit type to the other wraps.
    return dtype not in (*EIGHT_BITS, torch.bool)
