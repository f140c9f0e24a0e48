"""Backends: compile a lowered graph to a runner."""

from __future__ import annotations

from qfuse.backends.backend import Backend
from qfuse.backends.claimed import run_claimed
from qfuse.backends.compile import compile_claimed, compile_graph
from qfuse.backends.compiled import CompiledModule
from qfuse.backends.installed import chosen_backends
from qfuse.backends.runner import BackendOptions, Progress, Runner

__all__ = [
    "Backend",
    "BackendOptions",
    "CompiledModule",
    "Progress",
    "Runner",
    "chosen_backends",
    "compile_claimed",
    "compile_graph",
    "run_claimed",
]
