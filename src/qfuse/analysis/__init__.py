"""Analyses of quantized models: lint of the placement of quantization, and accuracy per layer."""

from qfuse.analysis.placement.finding import LintFinding, Severity
from qfuse.analysis.placement.lint import lint

__all__ = ["LintFinding", "Severity", "lint"]
