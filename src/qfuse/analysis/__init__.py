"""Analyses of quantized models: lint of the placement of quantization, and accuracy per layer."""

from qfuse.analysis.placement.finding import Finding, Severity
from qfuse.analysis.placement.lint import lint

__all__ = ["Finding", "Severity", "lint"]
