"""The ways to ask for qfuse's passes inside ``torch.compile``.

Inductor takes a second to import, and is needed when somebody asks, not before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from qfuse.report import Report

if TYPE_CHECKING:
    # It imports Inductor, which `import qfuse` must not.
    from qfuse.inductor.process import Process


def inductor_options(**options: Any) -> dict[str, Any]:
    """Return options for ``torch.compile(model, options=...)`` with qfuse's passes in them.

    Linears are merged only where weights are frozen: set ``torch._inductor.config.freezing = True``
    before the first call, and call under ``torch.no_grad()``. Without that, weights are inputs and
    nothing is merged. ``qfuse.reports()`` says afterwards what the passes did.

    Args:
        options: Inductor's own options, by name (``**{"cpp.threads": 4}`` for those with a dot).
            Passes among them stay, and run before qfuse's; where a slot is not given, what is in
            it at the moment stays.

    Raises:
        OptionsError: Inductor has no such option, or it has no effect here.
    """
    return _process().options(options)


@contextmanager
def inductor_passes(*, freezing: bool | None = None) -> Iterator[None]:
    """Add qfuse's passes to whatever ``torch.compile`` compiles for the first time within.

    What is in Inductor's slots stays and runs first. Afterwards everything is as it was.
    Inductor's options hold for one thread, and so does this.

    Args:
        freezing: Turns Inductor's freezing on or off within; by default it is left as it is.
            Without it weights are inputs, and nothing can be merged.

    Raises:
        OptionsError: ``freezing`` is something else.
    """
    with _process().passes(freezing):
        yield


def install() -> None:
    """Add qfuse's passes to whatever ``torch.compile`` compiles from now on, until uninstalled.

    Linears are merged only where weights are frozen: see :func:`inductor_options`. A second call
    does nothing. Inductor's options hold for one thread, and so does this.
    """
    _process().install()


def uninstall() -> None:
    """Take out what :func:`install` put in; what was there before is there again."""
    _process().uninstall()


def reports() -> tuple[Report, ...]:
    """Return a report for each graph that was compiled with qfuse's passes, or came from a cache.

    In the order in which they were compiled. A model may be several graphs. Reports are kept until
    :func:`clear_reports`.
    """
    return _process().reports()


def clear_reports() -> None:
    """Forget the reports of all graphs that were compiled until now, for processes that live on."""
    _process().clear()


def _process() -> Process:
    from qfuse.inductor.process import PROCESS  # noqa: PLC0415 - imports Inductor

    return PROCESS
