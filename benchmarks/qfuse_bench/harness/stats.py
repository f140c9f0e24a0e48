"""The statistics of the tables: medians, ratios with confidence intervals, and SQNR."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

_DRAWS = 4000
_TAIL = 0.025  # on either side of a 95 % interval


@dataclass(frozen=True, slots=True)
class Ratio:
    """The ratio of two times; below 1 the first one is faster.

    Attributes:
        value: Median of the first over median of the second.
        low: Lower end of the 95 % interval.
        high: Upper end.
    """

    value: float
    low: float
    high: float


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return quantile(values, 0.5)


def quantile(values: Sequence[float], at: float) -> float:
    """Return the value below which the fraction ``at`` lies, interpolated linearly."""
    if not values:
        raise ValueError("no values have no quantile")
    return float(np.quantile(np.asarray(values, dtype=np.float64), at))


def ratio_of_medians(ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0) -> Ratio:
    """Compare two series that were measured in the same rounds.

    The interval is a percentile bootstrap over *rounds*: load in a round slows both, so pairs are
    drawn together.

    Args:
        ours: One time per round.
        theirs: Of the same rounds, in the same order.
        seed: Of the draws: equal series give equal intervals.
    """
    return _summary(median(ours) / median(theirs), _drawn_ratios(ours, theirs, seed))


def mean_ratio(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Ratio | None:
    """Return the geometric mean of the ratios of several pairs of series, with its interval.

    Args:
        pairs: Ours and theirs, as :func:`ratio_of_medians` takes them; each was measured by itself.

    Returns:
        ``None`` without pairs.
    """
    if not pairs:
        return None
    value = geometric_mean(median(ours) / median(theirs) for ours, theirs in pairs)
    drawn = [_drawn_ratios(*pair, seed) for seed, pair in enumerate(pairs)]
    return _summary(value, np.exp(np.mean(np.log(drawn), axis=0)))


def _drawn_ratios(
    ours: Sequence[float], theirs: Sequence[float], seed: int
) -> npt.NDArray[np.float64]:
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} and {len(theirs)} rounds do not pair")
    pairs = np.asarray([ours, theirs], dtype=np.float64)
    rounds = pairs.shape[1]
    draws = np.random.default_rng(seed).integers(rounds, size=(_DRAWS, rounds))
    above, below = np.median(pairs[:, draws], axis=2)
    drawn: npt.NDArray[np.float64] = above / below
    return drawn


def _summary(value: float, drawn: npt.NDArray[np.float64]) -> Ratio:
    low, high = np.quantile(drawn, [_TAIL, 1 - _TAIL])
    return Ratio(value, float(low), float(high))


def geometric_mean(values: Iterable[float]) -> float:
    """Return the n-th root of the product; NaN of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def sqnr(reference: Sequence[torch.Tensor], answer: Sequence[torch.Tensor]) -> float:
    """Return the signal-to-quantization-noise ratio of an answer in dB.

    ``10 log10(|reference|^2 / |reference - answer|^2)`` over all elements of all outputs in
    float64. Infinite for an exact answer, minus infinity for one of another shape or not finite.
    """
    if [a.shape for a in reference] != [b.shape for b in answer]:
        return -math.inf
    signal = noise = 0.0
    for a, b in zip(reference, answer, strict=True):
        exact = a.to(torch.float64)
        signal += float(exact.square().sum())
        noise += float((exact - b.to(torch.float64)).square().sum())
    if noise == 0.0:
        return math.inf
    if signal == 0.0 or not math.isfinite(noise):
        return -math.inf
    return 10 * math.log10(signal / noise)
