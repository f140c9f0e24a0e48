"""Functions of Dynamo that have no public name."""

from __future__ import annotations

from torch._dynamo import graph_break, mark_dynamic

__all__ = ["graph_break", "mark_dynamic"]
