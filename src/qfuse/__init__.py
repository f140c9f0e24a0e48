"""qfuse: a quantization graph compiler for PyTorch.

``qfuse.compile(model, args)`` compiles a quantized model. The ``report`` of the result lists what
was fused, what was not, and why. ``qfuse.explain`` returns the report without compiling.
``qfuse.passes`` holds the rewrites as standalone FX passes; it is imported on first access. To use
qfuse inside ``torch.compile``, pass ``options=qfuse.inductor_options()`` and call
``qfuse.reports()``.
"""

import importlib as _importlib
import sys as _sys
import typing as _typing

from qfuse._version import __version__
from qfuse.ir.errors import (
    BackendError,
    CaptureError,
    CompiledModelError,
    ExtensionError,
    GraphError,
    InputError,
    ModelFileError,
    NormalizeError,
    OptionsError,
    OutOfMemoryError,
    PlanError,
    QfuseError,
    StrictError,
    TrainingError,
)

# `qfuse diff` and `qfuse plan diff` compare two JSON files, and read the package without torch.
if not getattr(_sys.modules.get("qfuse_command"), "without_torch", False):
    from qfuse.api import CompiledModel, compile, explain, load  # noqa: A004 - the field's word
    from qfuse.exported import optimize  # a stage has this name too
    from qfuse.options import Options
    from qfuse.report import Report
    from qfuse.targets import Target

__all__ = [
    "BackendError",
    "CaptureError",
    "CompiledModel",
    "CompiledModelError",
    "ExtensionError",
    "GraphError",
    "InputError",
    "ModelFileError",
    "NormalizeError",
    "Options",
    "OptionsError",
    "OutOfMemoryError",
    "PlanError",
    "QfuseError",
    "Report",
    "StrictError",
    "Target",
    "TrainingError",
    "__version__",
    "bisect",
    "clear_reports",
    "compile",
    "explain",
    "inductor_options",
    "inductor_passes",
    "install",
    "lint",
    "load",
    "measure_accuracy",
    "optimize",
    "passes",
    "reports",
    "uninstall",
]

if _typing.TYPE_CHECKING:
    from qfuse import passes
    from qfuse.analysis import lint, measure_accuracy
    from qfuse.bisection import bisect
    from qfuse.dynamo import clear_reports, reports
    from qfuse.inductor import inductor_options, inductor_passes, install, uninstall

_LAZY = {
    "bisect": "bisection",
    "clear_reports": "dynamo",
    "inductor_options": "inductor",
    "inductor_passes": "inductor",
    "install": "inductor",
    "lint": "analysis",
    "measure_accuracy": "analysis",
    "reports": "dynamo",
    "uninstall": "inductor",
}


def __getattr__(name: str) -> object:
    if name == "passes":
        return _importlib.import_module("qfuse.passes")
    if name in _LAZY:
        return getattr(_importlib.import_module(f"qfuse.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'qfuse' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
