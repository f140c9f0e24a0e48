"""Cases: directories that reproduce a rewrite which changed values and was rolled back."""

from __future__ import annotations

from qfuse.cases.case import Case, read_case
from qfuse.cases.rerun import Rerun, rerun_case
from qfuse.cases.write import REPRO_VARIABLE, keep_cases

__all__ = [
    "REPRO_VARIABLE",
    "Case",
    "Rerun",
    "keep_cases",
    "read_case",
    "rerun_case",
]
