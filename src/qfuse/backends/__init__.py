"""Backends: compile a lowered graph to a runner."""

from __future__ import annotations

from qfuse.backends.compile import compile_graph
from qfuse.backends.compiled import CompiledModule
from qfuse.backends.runner import BackendOptions, Progress, Runner

__all__ = ["BackendOptions", "CompiledModule", "Progress", "Runner", "compile_graph"]
