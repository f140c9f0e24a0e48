"""Matrix products of the normal form, seen alike: linears, convolutions and matmuls."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch.fx import Graph, Node

from qfuse.cost import Bits, ComputeKind, SizeRange, WorkRange, linear_work, size_range
from qfuse.cost.sizes import AtPoints
from qfuse.ir.dtypes import bit_width
from qfuse.ir.graph.stage_graph import SymbolRange
from qfuse.ir.ops.convolution import Convolution, as_convolution
from qfuse.ir.ops.linear import as_linear
from qfuse.ir.ops.matmul import as_matmul
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.sizes import Size

_KINDS = {16: ComputeKind.BF16, 32: ComputeKind.F32, 64: ComputeKind.F32}
_INT8 = Bits(8, 8, 32)


@dataclass(frozen=True, slots=True)
class Product:
    """A product of an activation with a weight, or with another activation.

    Attributes:
        node: The call.
        x: The left operand, or the input of a convolution.
        other: The weight, or the right operand.
        x_summed: The axis of ``x`` that is summed over.
        other_summed: The axis of ``other`` that is summed over.
        other_kept: The axis of ``other`` that the result has.
        rows: The sizes of the result without those of ``other``; for a transposed convolution the
            input pixels.
        k: Products per element of the result.
        n: Elements per row.
        depthwise: Whether every channel is convolved for itself.
        calls_library: Whether the float op sets up a oneDNN primitive in every call.
    """

    node: Node
    x: Node
    other: Node
    x_summed: int
    other_summed: int
    other_kept: int
    rows: tuple[Size, ...]
    k: tuple[Size, ...]
    n: tuple[Size, ...]
    depthwise: bool = False
    calls_library: bool = False

    def work(
        self, bits: Bits, kind: ComputeKind, symbols: Mapping[str, SymbolRange] | None = None
    ) -> WorkRange:
        """Return the work of one call with operands of some widths."""
        rows, k, n = (_product(sizes, symbols) for sizes in (self.rows, self.k, self.n))
        return linear_work(rows, k, n, bits, kind)

    def float_work(self, symbols: Mapping[str, SymbolRange] | None = None) -> WorkRange:
        """Return the work of the product in the float dtype of its result."""
        width = min(bit_width(dtype_of(self.node)), 32)
        work = self.work(Bits(width, width, width), _KINDS[width], symbols)
        if not self.calls_library:
            return work
        return AtPoints(*(one.with_calls(1, 1) for one in work.values))

    def int8_work(self, symbols: Mapping[str, SymbolRange] | None = None) -> WorkRange:
        """Return the work of the product of 8-bit operands with a float result."""
        return self.work(_INT8, ComputeKind.INT8, symbols)


def products_of(graph: Graph) -> Iterator[Product]:
    """Yield the products of a graph, in order."""
    for node in graph.nodes:
        found = as_product(node)
        if found is not None:
            yield found


def as_product(node: object) -> Product | None:
    """View ``node`` as a product, or ``None``."""
    linear = as_linear(node)
    if linear is not None:
        shape = shape_of(linear.x)
        n, k = shape_of(linear.weight)
        return Product(
            linear.node, linear.x, linear.weight, -1, 1, 0, tuple(shape[:-1]), (k,), (n,)
        )
    matmul = as_matmul(node)
    if matmul is not None:
        left, right = shape_of(matmul.x), shape_of(matmul.other)
        # A product with a vector has no rows or columns.
        if min(len(left), len(right)) < 2:  # noqa: PLR2004
            return None
        rows = tuple(shape_of(matmul.node)[:-1])
        return Product(
            matmul.node, matmul.x, matmul.other, -1, -2, -1, rows, (left[-1],), (right[-1],)
        )
    convolution = as_convolution(node)
    return None if convolution is None else _of_convolution(convolution)


def _of_convolution(op: Convolution) -> Product:
    weight = tuple(shape_of(op.weight))
    pixels = op.x if op.transposed else op.node
    rows = tuple(size for axis, size in enumerate(shape_of(pixels)) if axis != op.axis)
    groups = op.groups if isinstance(op.groups, int) else 1
    k, n = (weight[:1], weight[1:]) if op.transposed else (weight[1:], weight[:1])
    kept, summed = (1, 0) if op.transposed else (0, 1)
    depthwise = groups > 1 and groups == shape_of(op.x)[op.axis]
    return Product(
        *(op.node, op.x, op.weight, op.axis, summed, kept),
        *(rows, k, n, depthwise, True),
    )


def _product(sizes: tuple[Size, ...], symbols: Mapping[str, SymbolRange] | None) -> SizeRange:
    fixed = math.prod(size for size in sizes if isinstance(size, int))
    total = SizeRange(fixed, fixed, fixed)
    for size in sizes:
        if not isinstance(size, int):
            total *= size_range(size, symbols)
    return total
