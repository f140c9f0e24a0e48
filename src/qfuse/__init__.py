"""qfuse: a quantization graph compiler for PyTorch.

``qfuse.compile(model, args)`` compiles a quantized model. The ``report`` of the result lists what
was fused, what was not, and why. ``qfuse.explain`` returns the report without compiling.
``qfuse.passes`` holds the rewrites as standalone FX passes. To use qfuse inside ``torch.compile``,
pass ``options=qfuse.inductor_options()`` and call ``qfuse.reports()``.

Each name is imported on first access, so that what needs no torch does not import it.
"""

import importlib as _importlib
import importlib.util as _importlib_util
import sys as _sys
import types as _types
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
    PlanError,
    QfuseError,
    StrictError,
    TrainingError,
)

if _typing.TYPE_CHECKING:
    from qfuse import passes
    from qfuse.analysis import lint, measure_accuracy
    from qfuse.api import CompiledModel, compile, explain, load  # noqa: A004 - the field's word
    from qfuse.bisection import bisect
    from qfuse.dynamo import clear_reports, reports
    from qfuse.exported.optimize import optimize  # a stage has this name too
    from qfuse.inductor import inductor_options, inductor_passes, install, uninstall
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

_LAZY = {
    "CompiledModel": "api",
    "Options": "options",
    "Report": "report",
    "Target": "targets",
    "bisect": "bisection",
    "clear_reports": "dynamo",
    "compile": "api",
    "explain": "api",
    "inductor_options": "inductor",
    "inductor_passes": "inductor",
    "install": "inductor",
    "lint": "analysis",
    "load": "api",
    "measure_accuracy": "analysis",
    "reports": "dynamo",
    "uninstall": "inductor",
}


class _Face(_types.ModuleType):
    """The package, in which ``optimize`` is the function, although a stage has this name too."""

    @property
    def optimize(self) -> object:
        found: object = _importlib.import_module("qfuse.exported").optimize
        return found

    @optimize.setter
    def optimize(self, stage: object) -> None:
        """Importing the stage would set it."""


_sys.modules[__name__].__class__ = _Face


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(_importlib.import_module(f"qfuse.{_LAZY[name]}"), name)
    # A module of the package, as after an import of everything.
    if not name.startswith("_") and _importlib_util.find_spec(f"qfuse.{name}") is not None:
        return _importlib.import_module(f"qfuse.{name}")
    raise AttributeError(f"module 'qfuse' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
