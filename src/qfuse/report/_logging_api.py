"""The structured log of torch: this package's only file with private torch API."""

from __future__ import annotations

from collections.abc import Callable

from torch._logging._internal import trace_log, trace_structured


def is_traced() -> bool:
    """Whether the log is written: ``TORCH_TRACE`` names a folder, or a program listens to it."""
    # The handler of torch is always there, and without a folder it writes nothing.
    return any(getattr(handler, "root_dir", "") is not None for handler in trace_log.handlers)


def log_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Write one artifact, which belongs to the graph that is compiled, if there is one.

    Args:
        name: Its name; tlparse makes a file of it.
        encoding: ``json`` or ``string``.
        payload: Returns its text.
    """
    trace_structured("artifact", lambda: {"name": name, "encoding": encoding}, payload_fn=payload)
