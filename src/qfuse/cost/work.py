"""Work: what one kernel call computes and moves, without saying how long that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from qfuse.cost.sizes import AtPoints, Size, at_points
from qfuse.ir.errors import OptionsError


class ComputeKind(StrEnum):
    """The arithmetic that a kernel's multiplications run in. ``NONE``: it only moves data."""

    NONE = "none"
    F32 = "f32"
    BF16 = "bf16"
    INT8 = "int8"


@dataclass(frozen=True, slots=True)
class Work:
    """What one or several kernel calls of one kind do.

    Attributes:
        flops: Multiplications and additions, two per product term.
        kind: The arithmetic that they run in.
        weight_bytes: Constants read. They come from memory: between two uses of a weight lies the
            rest of the model.
        reads: Bytes of each activation read. One that fits comes from the cache.
        writes: Bytes of each activation written.
        one_row_flops: The part of ``flops`` that a single row of the left operand needs. A kernel
            that reuses weights among rows pays for it at the rate of one row.
        kernel_calls: Operator calls.
        library_calls: Those of them that set up a oneDNN primitive anew each time.
    """

    flops: float = 0.0
    kind: ComputeKind = ComputeKind.NONE
    weight_bytes: float = 0.0
    reads: tuple[float, ...] = ()
    writes: tuple[float, ...] = ()
    one_row_flops: float = 0.0
    kernel_calls: int = 1
    library_calls: int = 0

    def __post_init__(self) -> None:
        amounts = (self.flops, self.weight_bytes, *self.reads, *self.writes, self.one_row_flops)
        if min(*amounts, self.kernel_calls, self.library_calls) < 0:
            raise OptionsError(f"work cannot be negative: {self}")
        if self.one_row_flops > self.flops or self.library_calls > self.kernel_calls:
            raise OptionsError(f"a part of the work is larger than the whole: {self}")

    @property
    def bytes_read(self) -> float:
        """Bytes of weights and activations read."""
        return self.weight_bytes + sum(self.reads)

    @property
    def bytes_written(self) -> float:
        """Bytes of activations written."""
        return sum(self.writes)

    def with_calls(self, kernel_calls: int, library_calls: int = 0) -> Work:
        """The same work, spread over another number of calls."""
        return replace(self, kernel_calls=kernel_calls, library_calls=library_calls)

    def moving(
        self,
        *,
        weight_bytes: float = 0.0,
        reads: Sequence[float] = (),
        writes: Sequence[float] = (),
    ) -> Work:
        """The same work with more to move: scales, a bias, a residual, a second output."""
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


def linear_work(m: Size, k: Size, n: Size, bits: Bits, kind: ComputeKind) -> WorkRange:
    """The work of ``x[m, k] @ weight[n, k].T`` in one call.

    Scales and bias are not counted; add them with :meth:`Work.moving` where they matter.

    Args:
        m: Rows of the input, the product of all its leading axes.
        k: Length of the reduced axis.
        n: Length of the output axis.
        bits: Stored widths of the three tensors.
        kind: The arithmetic: ``F32`` or ``BF16`` for a weight-only kernel that unpacks first.
    """

    def build(rows: int, depth: int, columns: int) -> Work:
        return Work(
            flops=2.0 * rows * depth * columns,
            kind=kind,
            weight_bytes=depth * columns * bits.weight / 8,
            reads=(rows * depth * bits.x / 8,),
            writes=(rows * columns * bits.out / 8,),
            one_row_flops=2.0 * min(rows, 1) * depth * columns,
        )

    return at_points(build, m, k, n)


def pointwise_work(elements: Size, reads: Sequence[int], writes: Sequence[int]) -> WorkRange:
    """The work of one elementwise kernel.

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
    """The same work as a part of somebody else's call, such as a loop that a compiler fuses."""
    return AtPoints(*(one.with_calls(0) for one in work.values))
