"""Work: the operations and bytes of kernel calls, independent of the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from qfuse.cost.sizes import AtPoints, SizeOrRange, at_points
from qfuse.ir.errors import OptionsError


class ComputeKind(StrEnum):
    """The arithmetic of a kernel's multiplications. ``NONE``: it only moves data."""

    NONE = "none"
    F32 = "f32"
    BF16 = "bf16"
    INT8 = "int8"


class ProductKind(StrEnum):
    """Kernels of products with a constant weight, whose times are measured.

    The arithmetic, then the stored weight where it is another one.
    """

    F32 = "f32"
    F32_INT8 = "f32 x int8"
    F32_INT4 = "f32 x int4"
    BF16 = "bf16"
    BF16_INT8 = "bf16 x int8"
    BF16_INT4 = "bf16 x int4"
    INT8 = "int8"
    INT8_INT4 = "int8 x int4"
    ATEN_INT8 = "aten._int_mm"
    ATEN_F32_INT8 = "aten._weight_int8pack_mm in f32"
    ATEN_BF16_INT8 = "aten._weight_int8pack_mm in bf16"

    @classmethod
    def of(cls, kind: ComputeKind, weight_bits: int) -> ProductKind | None:
        """Return qfuse's or the float product of an arithmetic; ``None`` if none is measured."""
        return _PRODUCTS.get((kind, weight_bits))

    @property
    def weight_bits(self) -> int:
        """Bits of a stored weight."""
        return _BITS.get(self, 8)


GROUP_PRODUCTS = 12
"""How many products a scale of a group of input features counts as: scaling a sum takes about as
long."""

_PRODUCTS = {
    (ComputeKind.F32, 32): ProductKind.F32,
    (ComputeKind.F32, 8): ProductKind.F32_INT8,
    (ComputeKind.F32, 4): ProductKind.F32_INT4,
    (ComputeKind.BF16, 16): ProductKind.BF16,
    (ComputeKind.BF16, 8): ProductKind.BF16_INT8,
    (ComputeKind.BF16, 4): ProductKind.BF16_INT4,
    (ComputeKind.INT8, 8): ProductKind.INT8,
    (ComputeKind.INT8, 4): ProductKind.INT8_INT4,
}


_BITS = {product: bits for (_, bits), product in _PRODUCTS.items()}


@dataclass(frozen=True, slots=True)
class Work:
    """The operations and bytes of one or several kernel calls of one kind.

    Attributes:
        flops: Multiplications and additions, two per product term.
        kind: Their arithmetic.
        weight_bytes: Constants read. They come from memory, because the rest of the model runs
            between two uses of a weight.
        reads: Bytes of each activation read. One that fits is read from the cache.
        writes: Bytes of each activation written.
        one_row_flops: The part of ``flops`` for a single row of the left operand. A kernel that
            reuses weights across rows runs it at the rate of one row.
        kernel_calls: Number of operator calls.
        library_calls: Those of them that set up a oneDNN primitive on each call.
        product: The kernels that run at measured rates, if the profile has them.
        columns: Columns of the result of a product, which such rates need.
    """

    flops: float = 0.0
    kind: ComputeKind = ComputeKind.NONE
    weight_bytes: float = 0.0
    reads: tuple[float, ...] = ()
    writes: tuple[float, ...] = ()
    one_row_flops: float = 0.0
    kernel_calls: int = 1
    library_calls: int = 0
    product: ProductKind | None = None
    columns: float = 0.0

    def __post_init__(self) -> None:
        amounts = (self.flops, self.weight_bytes, *self.reads, *self.writes, self.one_row_flops)
        if min(*amounts, self.kernel_calls, self.library_calls, self.columns) < 0:
            raise OptionsError(f"work cannot be negative: {self}")
        # The model subtracts the parts from the whole, and could return negative times.
        if self.one_row_flops > self.flops or self.library_calls > self.kernel_calls:
            raise OptionsError(f"a part of the work is larger than the whole: {self}")

    def with_calls(self, kernel_calls: int, library_calls: int = 0) -> Work:
        """Return the same work with a different number of calls."""
        return replace(self, kernel_calls=kernel_calls, library_calls=library_calls)

    def moving(
        self,
        *,
        weight_bytes: float = 0.0,
        reads: Sequence[float] = (),
        writes: Sequence[float] = (),
    ) -> Work:
        """Return the same work with more data: scales, a bias, a residual, a second output."""
        return replace(
            self,
            weight_bytes=self.weight_bytes + weight_bytes,
            reads=(*self.reads, *reads),
            writes=(*self.writes, *writes),
        )


WorkRange = AtPoints[Work]


@dataclass(frozen=True, slots=True)
class Bits:
    """Bits per stored element of a linear's input, weight and output."""

    x: int
    weight: int
    out: int


def linear_work(
    m: SizeOrRange,
    k: SizeOrRange,
    n: SizeOrRange,
    bits: Bits,
    kind: ComputeKind,
    product: ProductKind | None = None,
) -> WorkRange:
    """Return the work of ``x[m, k] @ weight[n, k].T`` in one call.

    Scales and bias are not counted; add them with :meth:`Work.moving` if they matter.

    Args:
        m: Rows of the input, the product of all its leading axes.
        k: Length of the reduced axis.
        n: Length of the output axis.
        bits: Stored widths of the three tensors.
        kind: The arithmetic: ``F32`` or ``BF16`` for a weight-only kernel that unpacks first.
        product: The kernels that run it; by default those of the arithmetic and the weight.
    """
    product = product or ProductKind.of(kind, bits.weight)

    def build(rows: int, depth: int, columns: int) -> Work:
        return Work(
            flops=2.0 * rows * depth * columns,
            kind=kind,
            # 4-bit weights are half a byte each, so bytes are floats.
            weight_bytes=depth * columns * bits.weight / 8,
            reads=(rows * depth * bits.x / 8,),
            writes=(rows * columns * bits.out / 8,),
            # No rows have no first row.
            one_row_flops=2.0 * min(rows, 1) * depth * columns,
            product=product,
            columns=columns,
        )

    return at_points(build, m, k, n)


def pointwise_work(elements: SizeOrRange, reads: Sequence[int], writes: Sequence[int]) -> WorkRange:
    """Return the work of one elementwise kernel.

    Args:
        elements: Elements of every operand.
        reads: Bits per element of each tensor read.
        writes: Bits per element of each tensor written.
    """

    def build(count: int) -> Work:
        return Work(
            reads=tuple(count * bits / 8 for bits in reads),
            writes=tuple(count * bits / 8 for bits in writes),
        )

    return at_points(build, elements)


def without_calls(work: WorkRange) -> WorkRange:
    """Return the same work without call overhead, such as a loop fused into another kernel."""
    return AtPoints(*(one.with_calls(0) for one in work.values))
