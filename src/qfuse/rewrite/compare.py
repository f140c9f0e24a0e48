"""Compare values by exactness class."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qfuse.ir.events import Exactness
from qfuse.ir.quant.spec import dtype_name
from qfuse.rewrite.tolerance import Tolerance


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one comparison.

    Attributes:
        wrong: What is wrong, or ``None``.
        error: The error in the deciding measure (a multiple of the noise, or a share).
        allowed: The bound on ``error``.
    """

    wrong: str | None
    error: float = 0.0
    allowed: float = 0.0


def compare(
    new: torch.Tensor,
    old: torch.Tensor,
    truth: torch.Tensor | None,
    exactness: Exactness,
    tolerance: Tolerance,
    noise: torch.Tensor | None = None,
) -> Verdict:
    """Compare ``new`` with the source's ``old``.

    Args:
        new: Value after the rewrite.
        old: Value before.
        truth: The source's meaning in float64; ``old`` itself when ``None``.
        exactness: *Exact* compares bits (NaN equals NaN); *rounding* compares with the noise of
            the source; *lossy* compares types only.
        tolerance: The row of the table.
        noise: The source's difference from the truth, if it was measured separately.
    """
    if new.dtype != old.dtype or new.shape != old.shape:
        shapes = (
            f"{dtype_name(old.dtype)}{list(old.shape)} -> {dtype_name(new.dtype)}{list(new.shape)}"
        )
        return Verdict(f"the type changed: {shapes}")
    # An empty tensor has no greatest error: `max` of it would raise.
    if exactness is Exactness.LOSSY or old.numel() == 0:
        return Verdict(None)
    if exactness is Exactness.EXACT:
        return _compare_bits(new, old)
    # Equal values pass whatever the noise is, which may be zero.
    if torch.equal(new, old):
        return Verdict(None)
    if not old.dtype.is_floating_point:
        return _compare_quantized(new, old, truth, tolerance, noise)
    return _compare_floats(new, old, truth, tolerance, noise)


def compare_rounded(
    new: torch.Tensor,
    old: torch.Tensor,
    truth: torch.Tensor | None,
    step: torch.Tensor,
    tolerance: Tolerance,
) -> Verdict:
    """Compare floats that were last rounded to a quantization grid: by step, then by noise.

    A value near a tie may round either way, so it may be off by a whole step whatever the noise is.
    The allowed share of such values is that of quantized values; the rest is compared as floats.

    Args:
        new: Value after the rewrite, of the type and shape of ``old``.
        old: Value before.
        truth: The source's meaning in float64; ``old`` itself when ``None``.
        step: The size of one rounding step, broadcastable to the values.
        tolerance: The row of the table.
    """
    if new.dtype != old.dtype or new.shape != old.shape or old.numel() == 0:
        return compare(new, old, truth, Exactness.ROUNDING, tolerance)
    reference = (old if truth is None else truth).double()
    apart, own = (_whole_steps(x.double() - reference, step.double()) for x in (new, old))
    verdict = _judge_steps(apart, own, tolerance)
    if verdict.wrong is not None:
        return verdict
    # A value that is a whole step off has been judged; the rest is compared without it.
    near = [torch.where(n > 0, reference, x.double()) for n, x in ((apart, new), (own, old))]
    narrow = [x.to(old.dtype) for x in near]
    return compare(narrow[0], narrow[1], truth, Exactness.ROUNDING, tolerance)


def _whole_steps(error: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Return the difference of each value in steps; 0 if one of the two is not finite."""
    return torch.nan_to_num((error.abs() / step).round(), nan=0.0, posinf=0.0)


def _compare_bits(new: torch.Tensor, old: torch.Tensor) -> Verdict:
    """Compare bits, so -0.0 differs from 0.0; any two NaNs are equal."""
    if new.is_floating_point():
        a, b = new.double(), old.double()
        differ = (a != b) | (torch.signbit(a) != torch.signbit(b))
        differ &= ~(a.isnan() & b.isnan())
    else:
        differ = new != old
    if not bool(differ.any()):
        return Verdict(None)
    share = float(differ.double().mean())
    return Verdict(f"{share:.3%} of the elements differ in bits", share, 0.0)


def _compare_quantized(
    new: torch.Tensor,
    old: torch.Tensor,
    truth: torch.Tensor | None,
    tolerance: Tolerance,
    noise: torch.Tensor | None,
) -> Verdict:
    """Compare quantized values: how many differ from the truth, and by how many steps.

    A source that rounds to bfloat16 before it quantizes flips many values itself, so the allowed
    share grows with the source's own flips.
    """
    reference = old if truth is None or truth.dtype != old.dtype else truth
    own = _steps(old, reference) if noise is None else noise.double()
    return _judge_steps(_steps(new, reference), own, tolerance)


def _judge_steps(apart: torch.Tensor, own: torch.Tensor, tolerance: Tolerance) -> Verdict:
    share, most = _share(apart), int(apart.max())
    # In a small tensor, one flipped value always exceeds the share, so one is always allowed.
    allowed = max(tolerance.codes, 1.0 / apart.numel(), tolerance.rms * _share(own))
    # The source may be off by `own` to one side and the result by as much to the other.
    reach = max(1, 2 * int(own.max()))
    if most > reach:
        return Verdict(f"quantized values are up to {most} steps apart", most, reach)
    if share > allowed:
        return Verdict(f"{share:.2%} of the quantized values differ by a step", share, allowed)
    return Verdict(None, share, allowed)


def _steps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.to(torch.int64) - b.to(torch.int64)).abs().double()


def _share(apart: torch.Tensor) -> float:
    return float((apart > 0).double().mean())


def _compare_floats(
    new: torch.Tensor,
    old: torch.Tensor,
    truth: torch.Tensor | None,
    tolerance: Tolerance,
    noise: torch.Tensor | None,
) -> Verdict:
    reference = (old if truth is None else truth).double()
    # PyTorch does not implement arithmetic on 8-bit floats.
    now, then = new.double(), old.double()
    finite_now, finite_then = now.isfinite(), then.isfinite()
    # Infinities count as equal only with the same sign.
    alike = (now == then) | (now.isnan() & then.isnan()) | (finite_now & finite_then)
    if not bool(alike.all()):
        return Verdict("the infinite or NaN values differ")
    finite = reference.isfinite() & finite_then
    zero = torch.zeros((), dtype=torch.float64)
    size = torch.where(finite, reference, zero)
    error = torch.where(finite, new.double() - reference, zero)
    own = torch.where(finite, old.double() - reference, zero) if noise is None else noise.double()
    unit = torch.finfo(old.dtype).eps * tolerance.floor
    # A source that is exact by luck has no noise, and the ratio would be infinite; an all-zero
    # output has no size either.
    rms = _rms(error) / max(_rms(own), unit * _rms(size), torch.finfo(torch.float64).tiny)
    peak = _peak(error) / max(_peak(own), unit * _peak(size), torch.finfo(torch.float64).tiny)
    if rms > tolerance.rms:
        return Verdict(f"the error is {rms:.3g} times the source's noise", rms, tolerance.rms)
    if peak > tolerance.peak:
        return Verdict(f"the worst error is {peak:.3g} times the noise", peak, tolerance.peak)
    return Verdict(None, rms, tolerance.rms)


def _rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


def _peak(x: torch.Tensor) -> float:
    return float(x.abs().max())
