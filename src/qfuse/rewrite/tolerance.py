"""Every tolerance of qfuse, each with its reason. Call sites do not define their own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a rewrite of class *rounding* may be from the float64 meaning of the source.

    Attributes:
        rms: Multiple of the source's own root-mean-square noise.
        peak: Multiple of the source's own greatest noise.
        floor: Noise is taken to be at least this many units in the last place of the output
            type, relative to the value's root mean square (its maximum for ``peak``).
        codes: Share of quantized values, and of floats that were last rounded to a quantization
            grid, that may be off, each by one step.
    """

    rms: float
    peak: float
    floor: float
    codes: float


SITE = Tolerance(
    # Two sums of the same terms in different orders have independent errors of equal size: their
    # ratio passes 4 with probability below 1e-6 from a few hundred elements on.
    rms=4.0,
    # The maximum of n Gaussians varies by less than a factor 2 between samples; a region of a
    # handful of elements may have a source that is exact by luck, which the floor covers.
    peak=8.0,
    # A result is rounded once to the output type (half a unit), the bias, the scale and the
    # activation round before it.
    floor=4.0,
    # A value flips if it lies within float32 noise (1e-6 of a step) of a tie.
    codes=1e-3,
)
"""One rewrite, on the values that its region sees."""

MODEL = Tolerance(
    # The noise is measured on the whole model by perturbing every matmul by the rounding of its
    # own dtype; 8 covers a different summation order in every layer at once.
    rms=8.0,
    # Dynamic quantization amplifies: a flipped value moves a whole row. Peaks follow the rms
    # with heavy tails.
    peak=32.0,
    floor=64.0,
    codes=2e-2,
)
"""A whole model, against the captured graph."""


@dataclass(frozen=True, slots=True)
class LongSum:
    """When the error of a sequential float32 sum counts as noise of the source.

    Attributes:
        terms: Sums of fewer terms do not count.
        most: The greatest relative error that counts.
    """

    terms: int
    most: float


LONG_SUM = LongSum(
    # Below, a sum of one sign is within the noise of a library's order.
    terms=1024,
    # With the factor of a site, an error of 0.05 % is allowed at most, so a wrong factor is found.
    most=2.0**-13,
)
"""Sums of many terms of one sign, which are asked for only where a site is otherwise wrong."""

FLIPPED_POWER = 1e-3
"""Power of the difference to the source, relative to that of the result, on inputs that were not
compiled with: 30 dB. A few values flip at ties; another function differs by more."""

MOST_MOVED = 2.0**-13
"""The most that an operand's last bit counts as noise, relative to the greatest value.

A product in any order of sums is the exact product of operands that are moved by a few units in the
last place (Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1), so what becomes
of such a move is the error that the values allow: ``sigmoid`` of -50 makes 50 units of one. With
the factor of a site, an error of 0.05 % is allowed at most; what moves farther crossed a tie.
"""

BACKEND_STEPS = 1
"""How many steps a quantized result of a lossy backend may be off: fixed-point arithmetic rounds at
other ties than float arithmetic."""

BACKEND_LEVELS = 255
"""A float result of a lossy backend may be off by its range divided by this: one step, if it were
quantized to 8 bits."""
