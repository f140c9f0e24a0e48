"""The error tree: what went wrong, where in the user's source, and what to do."""

from __future__ import annotations

from typing import Any

USER_CODE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""Exceptions that third-party code may raise, without those that request an exit."""

RULE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions of a rule that meets an unexpected graph, and of an op run on fake values."""


class QfuseError(Exception):
    """Base of every error that qfuse raises on purpose.

    Args:
        what: The problem, as one sentence without a trailing period.
        where: The location in the user's source or graph, if known.
        fix: What the user can do about it.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what = what
        self.where = where
        self.fix = fix
        lines = [what]
        if where:
            lines.append(f"  at: {where}")
        if fix:
            lines.append(f"  do: {fix}")
        super().__init__("\n".join(lines))


class CaptureError(QfuseError):
    """The model cannot be captured as a graph."""


class TrainingError(CaptureError):
    """The model is in training mode, or gradients would flow through it."""


class GraphError(QfuseError):
    """A graph passed to :mod:`qfuse.passes` is malformed."""


class NormalizeError(QfuseError):
    """A quantization op of the source graph is malformed or unknown."""


class BlockError(NormalizeError, ValueError):
    """A scale's shape does not tile the tensor's shape."""


class RewriteError(QfuseError):
    """A rule or pass broke its contract: a bug in the rule, not in the model."""


class VerifyError(QfuseError):
    """A graph breaks an invariant of its stage."""


class CheckError(QfuseError):
    """A rewrite changed values by more than its exactness class allows."""


class BackendError(QfuseError):
    """The lowered graph could not be compiled or loaded."""


class OutOfMemoryError(QfuseError, MemoryError):
    """Memory ran out while compiling. Nothing was written, and compiled models are as they were."""


class CacheError(QfuseError):
    """A cache entry is corrupt or foreign. Raised internally and handled by rebuilding."""


class ModelFileError(QfuseError):
    """The file of a compiled model cannot be written, cannot be read, or does not run here."""


class ExtensionError(QfuseError):
    """A dialect, rule, kernel or backend of another package is broken, or clashes with one."""


class StrictError(QfuseError):
    """A quantized op does not run on a quantized kernel, and ``strict`` was asked for.

    Attributes:
        report: The :class:`qfuse.Report` of what was planned.
    """

    report: Any = None


class PlanError(QfuseError, ValueError):
    """A plan is malformed, or does not fit the model, this machine or these versions."""


class CaseError(QfuseError):
    """A directory of ``qfuse repro`` is malformed, or lacks what it needs to run here."""


class OptionsError(QfuseError, ValueError):
    """An option has an invalid value."""


class InputError(QfuseError, ValueError, TypeError):
    """A compiled model was called with inputs that it was not compiled for."""


class CompiledModelError(QfuseError, RuntimeError):
    """A compiled model was asked for what only its source can do, such as training."""
