"""What qfuse did to a model and why, as data, as a table and as JSON."""

from qfuse.report.report import Report

__all__ = ["Report"]
