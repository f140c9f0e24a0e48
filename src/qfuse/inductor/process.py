"""Process-wide state: qfuse's passes in Inductor's slots, and the compiled graphs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

from qfuse.backends.inductor_options import checked_inductor_options
from qfuse.inductor import _inductor_api as inductor
from qfuse.inductor.hooks import SLOTS, Hooks, is_ours
from qfuse.inductor.journal import PassJournal
from qfuse.inductor.slots import Slots, composed, without
from qfuse.ir.errors import OptionsError
from qfuse.report import Report

_NEEDED = {"use_joint_graph_passes": True, "use_post_grad_passes": True}


class Process:
    """qfuse's passes in Inductor, and their reports."""

    def __init__(self) -> None:
        self._journal = PassJournal()
        self._slots = Slots(self._journal)
        self._installed: ContextVar[Hooks | None] = ContextVar("qfuse_installed", default=None)

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return Inductor options that contain qfuse's passes.

        Raises:
            OptionsError: Inductor has no such option, its value is of another type, it has no
                effect here, or it switches off the stages of Inductor that the passes run in.
        """
        given = checked_inductor_options(options, _NEEDED, "its passes run in them")
        frozen = given.get("freezing", inductor.freezing_is_on())
        if frozen != inductor.freezing_is_on():
            raise OptionsError(
                "the option freezing has no effect here: Dynamo reads it from the global config",
                fix=f"set torch._inductor.config.freezing = {frozen} before the first call, or "
                f"make that call within qfuse.inductor_passes(freezing={frozen})",
            )
        hooks = Hooks(self._journal)
        for slot in SLOTS:
            base = given.get(slot, inductor.option(slot))
            _check_passes(slot, base)
            # Installed passes are in the slots already.
            theirs = without(base, [p for p in inductor.passes_in(base) if is_ours(p)])
            given[slot] = composed(theirs, hooks.slots[slot])
        return given

    @contextmanager
    def passes(self, freezing: bool | None) -> Iterator[None]:
        """Put the passes in the slots for a region.

        Raises:
            OptionsError: ``freezing`` is not a bool or ``None``.
        """
        if freezing is not None and not isinstance(freezing, bool):
            raise OptionsError(f"freezing must be True, False or None, not {freezing!r}")
        hooks = Hooks(self._journal)
        before = self._journal.activity()
        with ExitStack() as stack:
            if freezing is not None:
                stack.enter_context(inductor.patched({"freezing": freezing}))
            self._slots.add(hooks)
            # On the stack, since the region or the warning below may raise.
            stack.callback(self._slots.remove, hooks)
            yield
            if self._journal.activity() == before:
                text = (
                    "nothing was compiled within qfuse.inductor_passes(): the first call of a "
                    "compiled model has to be inside; one that was called before is compiled "
                    "again after torch._dynamo.reset()"
                )
                warnings.warn(text, UserWarning, stacklevel=4)

    def install(self) -> None:
        """Put the passes in the slots until uninstalled."""
        if self._installed.get() is None:
            hooks = Hooks(self._journal)
            self._slots.add(hooks)
            self._installed.set(hooks)

    def uninstall(self) -> None:
        """Remove the installed passes."""
        hooks = self._installed.get()
        if hooks is not None:
            self._installed.set(None)
            self._slots.remove(hooks)

    def reports(self) -> tuple[Report, ...]:
        """Return the report of every graph."""
        self._slots.look()
        return self._journal.reports()

    def clear(self) -> None:
        """Clear the reports."""
        self._journal.clear()


# Inductor's slots and counters are process-wide, and a compiled graph does not record its caller.
# So this must be a singleton, created at import, before threads use it. Creating it changes no
# state; the module is only imported when passes are requested.
PROCESS = Process()


def _check_passes(slot: str, value: Any) -> None:
    for one in inductor.passes_in(value):
        if not callable(one):
            raise OptionsError(
                f"{slot} holds {one!r}, which is not a pass",
                fix="pass a function of a graph, a CustomGraphPass, or a list of them",
            )
