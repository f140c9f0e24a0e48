"""Dynamic sizes, represented by the three points at which plans are compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from qfuse.ir.errors import OptionsError

# The largest size considered if no upper bound is declared. Costs grow linearly from well below
# it, so a larger one would not change decisions.
UNBOUNDED = 1 << 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SizeRange:
    """A size between ``low`` and ``high``.

    Attributes:
        low: The smallest size.
        hint: The expected size, such as the traced one.
        high: The largest size, ``None`` if it is not declared.
    """

    low: int
    hint: int
    high: int | None

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.hint or (self.high is not None and self.hint > self.high):
            raise OptionsError(
                f"sizes must satisfy 0 <= low <= hint <= high, not {self.low}, {self.hint}, "
                f"{self.high}"
            )

    @property
    def points(self) -> tuple[int, int, int]:
        """Return the smallest, hinted and largest size (a large one if none is declared)."""
        greatest = max(self.hint, UNBOUNDED) if self.high is None else self.high
        return self.low, self.hint, greatest

    def __mul__(self, other: SizeOrRange) -> SizeRange:
        """Return the product, as of batch and sequence length, which are taken to grow together."""
        right = _range(other)
        # An unbounded factor makes an unbounded product.
        high = None if None in (self.high, right.high) else _product(self.high, right.high)
        return SizeRange(self.low * right.low, self.hint * right.hint, high)

    __rmul__ = __mul__


SizeOrRange = int | SizeRange


def _range(size: SizeOrRange) -> SizeRange:
    return size if isinstance(size, SizeRange) else SizeRange(size, size, size)


def _product(*factors: int | None) -> int:
    return math.prod(factor for factor in factors if factor is not None)


@dataclass(frozen=True, slots=True)
class AtPoints(Generic[T]):
    """A value at the smallest, hinted and largest size."""

    low: T
    hint: T
    high: T

    @property
    def values(self) -> tuple[T, T, T]:
        """Return all three, in order of size."""
        return self.low, self.hint, self.high


def at_points(build: Callable[..., T], *sizes: SizeOrRange) -> AtPoints[T]:
    """Evaluate a function of sizes at their smallest, hinted and largest values."""
    low, hint, high = zip(*(_range(size).points for size in sizes), strict=True)
    return AtPoints(build(*low), build(*hint), build(*high))
