"""Suggestions: what to change in a model so that an op is fused."""

from qfuse.report.advice.advice import OF_A_MODULE, Advice, Cause
from qfuse.report.advice.registry import ADVICE, NEEDS_NONE, advice_for

__all__ = ["ADVICE", "NEEDS_NONE", "OF_A_MODULE", "Advice", "Cause", "advice_for"]
