"""The cost model: time of work on a target, from speeds measured once per machine."""

from __future__ import annotations

import importlib as _importlib
import typing as _typing

from qfuse.cost.model import Bound, Comparison, CostModel, Estimate, Workload
from qfuse.cost.profile import CostProfile
from qfuse.cost.rates import ProductRates, RowRate
from qfuse.cost.sizes import AtPoints, SizeOrRange, SizeRange, at_points
from qfuse.cost.work import (
    Bits,
    ComputeKind,
    ProductKind,
    Work,
    WorkRange,
    linear_work,
    pointwise_work,
    without_calls,
)
from qfuse.ir.units import bytes_text, operations_text, rate_text, seconds_text

if _typing.TYPE_CHECKING:
    from qfuse.cost._torch_api import hint_of, kernels_in_use, size_range
    from qfuse.cost.measurement import measure
    from qfuse.cost.store import load_or_measure, profile_path

__all__ = [
    "AtPoints",
    "Bits",
    "Bound",
    "Comparison",
    "ComputeKind",
    "CostModel",
    "CostProfile",
    "Estimate",
    "ProductKind",
    "ProductRates",
    "RowRate",
    "SizeOrRange",
    "SizeRange",
    "Work",
    "WorkRange",
    "Workload",
    "at_points",
    "bytes_text",
    "hint_of",
    "kernels_in_use",
    "linear_work",
    "load_or_measure",
    "measure",
    "operations_text",
    "pointwise_work",
    "profile_path",
    "rate_text",
    "seconds_text",
    "size_range",
    "without_calls",
]

# On first access: two plans are compared without torch.
_LAZY = {
    "hint_of": "_torch_api",
    "kernels_in_use": "_torch_api",
    "load_or_measure": "store",
    "measure": "measurement",
    "profile_path": "store",
    "size_range": "_torch_api",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(_importlib.import_module(f"qfuse.cost.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'qfuse.cost' has no attribute {name!r}")
