"""The public API for qfuse's passes inside ``torch.compile``.

Inductor takes a second to import, so it is imported on first use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from qfuse.report import Report

if TYPE_CHECKING:
    # Imported lazily, since `import qfuse` must not import Inductor.
    from qfuse.inductor.process import Process


def inductor_options(**options: Any) -> dict[str, Any]:
    """Return options for ``torch.compile(model, options=...)`` that contain qfuse's passes.

    Linears are merged only if weights are frozen: set ``torch._inductor.config.freezing = True``
    before the first call, and call under ``torch.no_grad()``. Otherwise weights are graph inputs
    and nothing is merged. ``qfuse.reports()`` returns the reports of the passes.

    Args:
        options: Inductor's own options, by name (``**{"cpp.threads": 4}`` for those with a dot).
            Passes among them run before qfuse's; for other slots, so do the passes that are
            currently in the slot.

    Raises:
        OptionsError: Inductor has no such option, its value is of another type, it has no effect
            here, or it switches qfuse's passes off.
    """
    return _process().options(options)


@contextmanager
def inductor_passes(*, freezing: bool | None = None) -> Iterator[None]:
    """Context manager that adds qfuse's passes to everything that ``torch.compile`` compiles in it.

    Passes in Inductor's slots are kept and run first. The slots are restored on exit. Like
    Inductor's options, this applies to the current thread.

    Args:
        freezing: Enables or disables Inductor's freezing in the context; by default unchanged.
            Without freezing, weights are inputs and nothing can be merged.

    Raises:
        OptionsError: ``freezing`` is not a bool or ``None``.
    """
    with _process().passes(freezing):
        yield


def install() -> None:
    """Add qfuse's passes to everything that ``torch.compile`` compiles, until uninstalled.

    Linears are merged only if weights are frozen: see :func:`inductor_options`. A second call does
    nothing. Like Inductor's options, this applies to the current thread.
    """
    _process().install()


def uninstall() -> None:
    """Remove the passes of :func:`install` and restore the slots."""
    _process().uninstall()


def slot_reports() -> tuple[Report, ...]:
    """Return a report for each graph that was compiled with qfuse's passes, or loaded from a cache.

    In the order of compilation. A model may have several graphs. Reports are kept until
    :func:`clear_slot_reports`.
    """
    return _process().reports()


def clear_slot_reports() -> None:
    """Clear all reports, for long-running processes."""
    _process().clear()


def _process() -> Process:
    from qfuse.inductor.process import PROCESS  # noqa: PLC0415 - imports Inductor

    return PROCESS
