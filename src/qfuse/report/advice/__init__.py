"""Suggestions: what to change in a model so that an op is fused."""

from qfuse.report.advice.advice import Advice, Cause
from qfuse.report.advice.registry import ADVICE, NEEDS_NONE, advice_for

__all__ = ["ADVICE", "NEEDS_NONE", "Advice", "Cause", "advice_for"]
