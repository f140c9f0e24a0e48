"""Plans as data: the rewrites and kernels of one compilation, to save, edit, compare and replay."""

from __future__ import annotations

from qfuse.plans.data import KernelChoice, PlanData, Site, decisions_of
from qfuse.plans.diff import diff_plans
from qfuse.plans.fit import Edits, find_edits
from qfuse.plans.read import read_plan
from qfuse.plans.record import record_plan
from qfuse.plans.versions import package_versions

__all__ = [
    "Edits",
    "KernelChoice",
    "PlanData",
    "Site",
    "decisions_of",
    "diff_plans",
    "find_edits",
    "package_versions",
    "read_plan",
    "record_plan",
]
