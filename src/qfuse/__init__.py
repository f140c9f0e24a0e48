"""qfuse: a quantization graph compiler for PyTorch.

    fast = qfuse.compile(model, args)      # a quantized model in, a faster one out
    print(fast.report)                     # what was done, what was not, and why
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
