"""Select a backend and compile with it."""

from __future__ import annotations

from collections.abc import Sequence

from qfuse.backends.backend import Backend
from qfuse.backends.build import compile_aoti
from qfuse.backends.claimed import run_claimed
from qfuse.backends.eager import run_eagerly
from qfuse.backends.runner import BackendOptions, Progress, Runner
from qfuse.ir.errors import BackendError, OptionsError
from qfuse.ir.events import Noted
from qfuse.ir.graph.stage_graph import LoweredGraph


def compile_graph(
    lowered: LoweredGraph,
    *,
    backend: str = "auto",
    options: BackendOptions | None = None,
    progress: Progress | None = None,
) -> Runner:
    """Compile a lowered graph, which is not changed; its constants are shared, not copied.

    Args:
        lowered: The graph; the libraries of its custom ops must be loaded.
        backend: ``aoti``, ``eager``, or ``auto``: AOTInductor if it works, and otherwise eager
            with a warning in the report.
        options: Options of the compilation.
        progress: Called with a short description when a step begins.

    Raises:
        BackendError: The requested backend does not work on this machine or for this graph.
        OptionsError: The backend is unknown.
    """
    options = options or BackendOptions()
    match backend:
        case "eager":
            return run_eagerly(lowered)
        case "aoti":
            return compile_aoti(lowered, options, progress)
        case "auto":
            return _compile_or_run(lowered, options, progress)
        case _:
            raise OptionsError(f"unknown backend {backend!r}", fix="use 'auto', 'aoti' or 'eager'")


def compile_claimed(lowered: LoweredGraph, backends: Sequence[Backend]) -> Runner:
    """Compile a graph whose ops are divided among backends; it is not changed.

    Raises:
        BackendError: The backend cannot compile the graph.
    """
    if len(backends) == 1:
        return backends[0].compile(lowered)
    return run_claimed(lowered, backends)


def _compile_or_run(
    lowered: LoweredGraph, options: BackendOptions, progress: Progress | None
) -> Runner:
    try:
        return compile_aoti(lowered, options, progress)
    except BackendError as error:
        text = f"the model runs op by op, which is slower: {error}"
        lowered.log.add(Noted("backends", text, warn=True))
        return run_eagerly(lowered)
