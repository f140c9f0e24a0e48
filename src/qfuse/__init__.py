"""qfuse: a quantization graph compiler for PyTorch.

``qfuse.compile(model, args)`` takes a quantized model and gives a faster one, whose ``report`` says
what was done, what was not, and why. ``qfuse.explain`` gives the report alone.
"""

from qfuse._version import __version__
from qfuse.api import CompiledModel, compile, explain  # noqa: A004 - the field's word
from qfuse.ir.errors import (
    BackendError,
    CaptureError,
    InputError,
    NormalizeError,
    OptionsError,
    QfuseError,
)
from qfuse.options import Options
from qfuse.report import Report
from qfuse.targets import Target

__all__ = [
    "BackendError",
    "CaptureError",
    "CompiledModel",
    "InputError",
    "NormalizeError",
    "Options",
    "OptionsError",
    "QfuseError",
    "Report",
    "Target",
    "__version__",
    "compile",
    "explain",
]
