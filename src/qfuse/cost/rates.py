"""Measured rates of products with a constant weight, by number of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from qfuse.cost.work import ProductKind
from qfuse.ir.errors import OptionsError
from qfuse.ir.units import rate_text

# The better of two measurements is the one in which this product is faster.
_TYPICAL = 1024


class RowRate(NamedTuple):
    """The rate of products with a number of rows.

    Attributes:
        rows: Rows of the left operand.
        rate: OP/s.
        column_seconds: What each column of the result takes besides: its bias, scale and store, and
            what a short sum loses.
    """

    rows: int
    rate: float
    column_seconds: float = 0.0

    def seconds(self, one_row: float, columns: float) -> float:
        """Return the time of a product, from the operations of one row and the columns."""
        return self.rows * one_row / self.rate + columns * self.column_seconds

    @property
    def is_possible(self) -> bool:
        """Whether it gives positive times."""
        known = (self.rows, self.rate, self.column_seconds)
        return all(map(math.isfinite, known)) and min(known[:2]) > 0 and self.column_seconds >= 0


@dataclass(frozen=True, slots=True)
class ProductRates:
    """How fast the kernels of a product are when its weight comes from memory.

    Attributes:
        product: The kernels.
        rates: By ascending rows. Each row more than the last ones takes as long as each of those.
    """

    product: ProductKind
    rates: tuple[RowRate, ...]

    def __post_init__(self) -> None:
        counts = [one.rows for one in self.rates]
        rising = counts and counts == sorted(set(counts))
        if not rising or not all(one.is_possible for one in self.rates):
            raise OptionsError(f"rates of {self.product} must be positive, at rising rows")

    def seconds(self, one_row: float, rows: float, columns: float = 0.0) -> float:
        """Return the time of a product, interpolated between the rows that were measured.

        Args:
            one_row: Operations of one row.
            rows: Rows of the left operand.
            columns: Columns of the result.
        """
        times = [one.seconds(one_row, columns) for one in self.rates]
        # Rows can be added that nobody asks for, so fewer never take longer.
        for index in reversed(range(len(times) - 1)):
            times[index] = min(times[index : index + 2])
        below, before = 0, 0.0
        for one, time in zip(self.rates, times, strict=True):
            if rows <= one.rows:
                # Fewer rows than the first have to read the whole weight too.
                part = (rows - below) / (one.rows - below) if below else 1.0
                return before + part * (time - before)
            below, before = one.rows, time
        return before * rows / below

    def times(self, threads: int, memory: float) -> ProductRates:
        """Return the rates of one thread for several, which read ``memory`` B/s of weights."""
        weights_per_second = memory * 8 / self.product.weight_bits

        def scaled(one: RowRate) -> RowRate:
            # Two operations for each weight in each row.
            read = max(one.rate, 2 * one.rows * weights_per_second)
            return RowRate(one.rows, min(one.rate * threads, read), one.column_seconds / threads)

        return replace(self, rates=tuple(map(scaled, self.rates)))

    def rounded(self, rounding: Callable[[float], float]) -> ProductRates:
        """Return rounded rates."""

        def short(one: RowRate) -> RowRate:
            beside = rounding(one.column_seconds) if one.column_seconds else 0.0
            return RowRate(one.rows, rounding(one.rate), beside)

        return replace(self, rates=tuple(map(short, self.rates)))

    def best_of(self, other: ProductRates) -> ProductRates:
        """Return the better rate at every number of rows."""
        best: dict[int, RowRate] = {}
        for one in (*self.rates, *other.rates):
            best[one.rows] = min(best.get(one.rows, one), one, key=_typical_seconds)
        return ProductRates(self.product, tuple(best[rows] for rows in sorted(best)))

    def __str__(self) -> str:
        """``by rows, 1: 10 GOP/s, 4: 30 GOP/s``."""
        rates = ", ".join(f"{one.rows}: {rate_text(one.rate, 'OP')}" for one in self.rates)
        return f"by rows, {rates}"


def _typical_seconds(one: RowRate) -> float:
    return one.seconds(2.0 * _TYPICAL**2, _TYPICAL)


def best_rates(*profiles: Iterable[ProductRates]) -> tuple[ProductRates, ...]:
    """Return the best rates of every product."""
    best: dict[ProductKind, ProductRates] = {}
    for one in (rates for profile in profiles for rates in profile):
        best[one.product] = best[one.product].best_of(one) if one.product in best else one
    return tuple(best.values())


def rates_as_json(products: Iterable[ProductRates]) -> dict[str, list[list[float]]]:
    """Return JSON values for :func:`rates_from_json`."""
    return {str(one.product): [list(rate) for rate in one.rates] for one in products}


def rates_from_json(found: object) -> tuple[ProductRates, ...]:
    """Return the rates of JSON values.

    Raises:
        OptionsError: They are not rates.
    """
    if not isinstance(found, Mapping):
        raise OptionsError(f"products of a cost profile must be a mapping, not {found!r}")
    try:
        return tuple(
            ProductRates(
                ProductKind(name),
                tuple(
                    RowRate(int(rows), float(rate), float(beside)) for rows, rate, beside in rates
                ),
            )
            for name, rates in found.items()
        )
    except (TypeError, ValueError) as error:
        raise OptionsError(f"products of a cost profile are not rates: {error}") from error
