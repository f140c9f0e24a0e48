"""Find the rewrite, the kernel or the backend that causes a difference that a user sees."""

from __future__ import annotations

from qfuse.bisection.cause import bisect
from qfuse.bisection.result import Bisection, Culprit, Origin

__all__ = ["Bisection", "Culprit", "Origin", "bisect"]
