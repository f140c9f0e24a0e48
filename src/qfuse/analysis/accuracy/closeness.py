"""How close tensors are to a reference: SQNR, cosine and the largest error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

EXACT_DB = 100.0
"""From this SQNR on, differences are those of rounding in float32."""

CLOSENESS_NAMES = ("sqnr_db", "cosine", "largest_error")
"""Names of the numbers of :class:`Closeness` in plain data."""


@dataclass(frozen=True, slots=True)
class Closeness:
    """How close values are to a reference.

    Attributes:
        sqnr_db: Signal to quantization noise, ``10 log10(sum(reference^2) / sum(error^2))``, in dB;
            infinite for equal values, minus infinite if values are not finite where the reference
            is.
        cosine: Cosine of the angle between the two, from -1 to 1; NaN if one of them is zero.
        largest: The largest absolute error.
    """

    sqnr_db: float
    cosine: float
    largest: float

    @property
    def is_exact(self) -> bool:
        """Whether the two differ by no more than float rounding."""
        return self.sqnr_db >= EXACT_DB

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; numbers that are not finite are ``None``, as JSON has none."""
        numbers = zip(CLOSENESS_NAMES, (self.sqnr_db, self.cosine, self.largest), strict=True)
        return {name: n if math.isfinite(n) else None for name, n in numbers}


class ErrorSums:
    """Sums over pairs of tensors, from which :class:`Closeness` is computed."""

    __slots__ = ("_broken", "_dot", "_largest", "_noise", "_signal", "_value")

    def __init__(self) -> None:
        self._signal = self._noise = self._dot = self._value = self._largest = 0.0
        self._broken = False

    def add(self, reference: torch.Tensor, value: torch.Tensor) -> None:
        """Add a pair of one shape, without elements that are not finite in the reference.

        Quantized values are taken relative to the mean of the reference, since their zero is
        arbitrary.
        """
        a, b = reference.detach().double(), value.detach().double()
        if a.numel() and not reference.dtype.is_floating_point:
            mean = a.mean()
            a, b = a - mean, b - mean
        finite = torch.isfinite(a)
        if bool((finite & ~torch.isfinite(b)).any()):
            self._broken = True
        both = finite & torch.isfinite(b)
        a, b = torch.where(both, a, 0.0), torch.where(both, b, 0.0)
        error = a - b
        self._signal += float(a.square().sum())
        self._value += float(b.square().sum())
        self._dot += float((a * b).sum())
        self._noise += float(error.square().sum())
        if error.numel():
            self._largest = max(self._largest, float(error.abs().max()))

    def closeness(self) -> Closeness:
        """Return the result over all pairs so far."""
        norm = math.sqrt(self._signal * self._value)
        cosine = max(-1.0, min(1.0, self._dot / norm)) if norm else math.nan
        if self._broken:
            return Closeness(-math.inf, cosine, math.inf)
        if not self._noise:
            return Closeness(math.inf, cosine, 0.0)
        db = 10 * math.log10(self._signal / self._noise) if self._signal else -math.inf
        return Closeness(db, cosine, self._largest)


def db_text(db: float) -> str:
    """Format decibels: ``31.4``, ``exact``, or ``not finite``."""
    if db >= EXACT_DB:
        return "exact"
    return "not finite" if db == -math.inf else f"{db:.1f}"
