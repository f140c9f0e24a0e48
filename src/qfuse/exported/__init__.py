"""Optimize an ``ExportedProgram`` into another one: :func:`optimize`."""

from qfuse.exported.optimize import optimize, report_of

__all__ = ["optimize", "report_of"]
