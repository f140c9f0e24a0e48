"""An error for quantized ops that do not run on quantized kernels."""

from __future__ import annotations

from qfuse.ir.errors import StrictError
from qfuse.report.advice import advice_for
from qfuse.report.causes import Causes
from qfuse.report.report import Report

_MOST_NAMED = 5


def require_quantized(report: Report) -> None:
    """Check that every quantized op runs on a quantized kernel, or in float because that pays.

    Quantized ops are products that read something quantized. What other ops compute in float is
    allowed, with the quantizes and dequantizes for it.

    Raises:
        StrictError: One does not; the message names the op, its line, the reason and the fix, and
            its attribute ``report`` is the report.
    """
    found = list(Causes(list(report.events)).unquantized())
    if not found:
        return
    count = f"{len(found)} quantized op{'s do' if len(found) != 1 else ' does'}"
    lines = [f"{count} not run on a quantized kernel"]
    lines += [f"  {place}: {cause.tried}: {cause.reason}" for cause, place in found[:_MOST_NAMED]]
    if len(found) > _MOST_NAMED:
        lines.append(f"  and {len(found) - _MOST_NAMED} more")
    cause, place = found[0]
    advice = advice_for(cause)
    error = StrictError(
        "\n".join(lines),
        where=place.source or str(place),
        fix="leave out strict, and see report.actions" if advice is None else advice.do,
    )
    error.report = report
    raise error
