"""Analyses of quantized models: lint of the placement of quantization, and accuracy per layer."""

from qfuse.analysis.accuracy.accuracy import Accuracy, LayerAccuracy, measure_accuracy
from qfuse.analysis.accuracy.closeness import Closeness
from qfuse.analysis.accuracy.keep import KeptInFloat
from qfuse.analysis.placement.finding import LintFinding, Severity
from qfuse.analysis.placement.lint import lint

__all__ = [
    "Accuracy",
    "Closeness",
    "KeptInFloat",
    "LayerAccuracy",
    "LintFinding",
    "Severity",
    "lint",
    "measure_accuracy",
]
