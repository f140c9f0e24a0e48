"""The report of a compilation: as data, as tables and as JSON."""

from __future__ import annotations

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from qfuse.report.report import Report

__all__ = ["Report"]


def __getattr__(name: str) -> object:
    # On first access: two reports are compared as data, without torch.
    if name == "Report":
        return _importlib.import_module("qfuse.report.report").Report
    raise AttributeError(f"module 'qfuse.report' has no attribute {name!r}")
