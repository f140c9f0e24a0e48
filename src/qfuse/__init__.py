"""qfuse: a quantization graph compiler for PyTorch.

``qfuse.compile(model, args)`` compiles a quantized model. The ``report`` of the result lists what
was fused, what was not, and why. ``qfuse.explain`` returns the report without compiling.
``qfuse.passes`` holds the rewrites as standalone FX passes; it is imported on first access. To use
qfuse inside ``torch.compile``, pass ``options=qfuse.inductor_options()`` and call
``qfuse.reports()``.
"""

import importlib as _importlib
import typing as _typing

from qfuse._version import __version__
from qfuse.api import CompiledModel, compile, explain  # noqa: A004 - the field's word
from qfuse.ir.errors import (
    BackendError,
    CaptureError,
    ExtensionError,
    GraphError,
    InputError,
    NormalizeError,
    OptionsError,
    QfuseError,
    StrictError,
)
from qfuse.options import Options
from qfuse.report import Report
from qfuse.targets import Target

__all__ = [
    "BackendError",
    "CaptureError",
    "CompiledModel",
    "ExtensionError",
    "GraphError",
    "InputError",
    "NormalizeError",
    "Options",
    "OptionsError",
    "QfuseError",
    "Report",
    "StrictError",
    "Target",
    "__version__",
    "clear_reports",
    "compile",
    "explain",
    "inductor_options",
    "inductor_passes",
    "install",
    "lint",
    "measure_accuracy",
    "passes",
    "reports",
    "uninstall",
]

if _typing.TYPE_CHECKING:
    from qfuse import passes
    from qfuse.analysis import lint, measure_accuracy
    from qfuse.inductor import (
        clear_reports,
        inductor_options,
        inductor_passes,
        install,
        reports,
        uninstall,
    )

_INDUCTOR = (
    "clear_reports",
    "inductor_options",
    "inductor_passes",
    "install",
    "reports",
    "uninstall",
)
_ANALYSIS = ("lint", "measure_accuracy")


def __getattr__(name: str) -> object:
    if name == "passes":
        return _importlib.import_module("qfuse.passes")
    if name in _INDUCTOR:
        return getattr(_importlib.import_module("qfuse.inductor"), name)
    if name in _ANALYSIS:
        return getattr(_importlib.import_module("qfuse.analysis"), name)
    raise AttributeError(f"module 'qfuse' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
