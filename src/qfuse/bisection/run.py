"""Run the model, its captured graph and rewritten graphs on copies of one call."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.nn import Module

from qfuse.backends import CompiledModule, Runner
from qfuse.capture.untouched import untouched
from qfuse.ir.graph.stage_graph import StageGraph
from qfuse.ir.signature.caller import Caller
from qfuse.ir.signature.run import run_flat


@dataclass(frozen=True, slots=True)
class ExampleCall:
    """Arguments of a call; runs get copies, since a model may write to them.

    All runs begin with the caller's random state, and draw the same numbers.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    _random: torch.Tensor = field(default_factory=torch.get_rng_state)

    def copies(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return copies of the arguments; tensors keep what they share among each other."""
        with torch.no_grad():
            args, kwargs = copy.deepcopy((self.args, dict(self.kwargs)))
        return args, kwargs

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._random)
            yield

    def run_source(self, model: Module | ExportedProgram, captured: StageGraph) -> Any:
        """Return the result of the model, whose buffers are restored.

        Of an exported program, the captured graph is run: it is the program.
        """
        if isinstance(model, ExportedProgram):
            return self.run_graph(captured)
        args, kwargs = self.copies()
        state = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        try:
            with torch.no_grad(), untouched(model), self._drawing():
                return copy.deepcopy(model(*args, **kwargs))
        finally:
            with torch.no_grad():
                for buffer, value in state:
                    buffer.copy_(value)

    def run_graph(self, program: StageGraph) -> Any:
        """Return the result of a graph, run op by op; nothing is written."""
        args, kwargs = self.copies()
        caller = Caller(program.signature)
        leaves = caller.bind(args, kwargs)
        with self._drawing():
            outputs = run_flat(program.module, caller.check(leaves))
        return caller.rebuild(list(outputs[len(program.signature.mutations) :]), leaves)

    def run_compiled(self, program: StageGraph, runner: Runner) -> Any:
        """Return the result of compiled code, on a copy of its state."""
        args, kwargs = self.copies()
        with self._drawing():
            return CompiledModule(program.signature, runner.fork())(*args, **kwargs)
