"""The report of a compilation: as data, as tables and as JSON."""

from qfuse.report.report import Report

__all__ = ["Report"]
