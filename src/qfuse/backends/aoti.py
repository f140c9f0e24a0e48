"""Run a graph as an AOTInductor package, with constants by pointer and in-place state updates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from qfuse.backends.eager import EagerRunner
from qfuse.backends.prepare import Program
from qfuse.ir.errors import InputError
from qfuse.ir.graph.memory import address_of
from qfuse.ir.signature.size_expr import SizeFunction


class AotiRunner:
    """Compiled code with its constants and state; thread-safe."""

    backend = "aoti"

    def __init__(
        self,
        program: Program,
        entry: Callable[[list[torch.Tensor]], list[torch.Tensor]],
        constants: dict[str, torch.Tensor],
        conditions: Sequence[SizeFunction],
        otherwise: EagerRunner,
        turn: threading.Lock | None = None,
    ) -> None:
        """Make a runner.

        Args:
            program: The compiled program.
            entry: The code.
            constants: The constants that the code uses by pointer; kept alive here.
            conditions: Conditions on the sizes of a call that the code assumes.
            otherwise: Runs the calls that do not satisfy the conditions.
            turn: Lock held while the code runs; shared by runners with the same code.
        """
        self._program = program
        self._entry = entry
        self._constants = constants
        self._conditions = conditions
        self._otherwise = otherwise
        # The package runs one call at a time, and waiting inside it would hold the GIL, which an op
        # implemented in Python needs to finish: so calls wait here instead.
        self._turn = turn or threading.Lock()
        self._layouts = program.layouts
        self._state = list(program.state)
        self._memory = {address_of(t): i for i, t in enumerate(program.state)}
        self._writes = bool(program.written or program.late)
        # `results[:-0]` would be empty.
        self._results = -len(program.late) or None

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the code; see :meth:`qfuse.backends.Runner.run`."""
        # Inductor's code is wrong for these sizes, and says nothing.
        if self._conditions and not self._fits(inputs):
            return self._otherwise.run(inputs)
        tensors = [layout.place(x) for layout, x in zip(self._layouts, inputs, strict=True)]
        if self._state:
            self._refuse_state(inputs)
            tensors += self._state
        with self._turn:
            results = self._call(tensors)
        if self._writes:
            self._write_back(inputs, tensors, results)
        for output, position in self._program.returned:
            results[output] = inputs[position]
        return results[: self._results]

    def _call(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if not torch.is_autocast_enabled("cpu"):
            return self._entry(tensors)
        # The graph contains the casts of the source; autocast must not add others.
        with torch.autocast("cpu", enabled=False):
            return self._entry(tensors)

    def written(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what a run writes; see :meth:`qfuse.backends.Runner.written`."""
        return self._otherwise.written(inputs)

    def fork(self) -> AotiRunner:
        """Return a runner with its own copy of the state; code and constants are shared."""
        otherwise = self._otherwise.fork()
        names = self._program.names[len(self._layouts) :]
        state = tuple(otherwise.module.get_buffer(name) for name in names)
        program = replace(self._program, state=state)
        return AotiRunner(
            program, self._entry, self._constants, self._conditions, otherwise, self._turn
        )

    def _fits(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether the sizes of a call satisfy the conditions of the code."""
        sizes = {s.name: inputs[s.position].shape[s.axis] for s in self._program.sizes.values()}
        return all(holds(sizes) for holds in self._conditions)

    def _refuse_state(self, inputs: Sequence[torch.Tensor]) -> None:
        """Refuse inputs that alias the state: the code may write state before it loads inputs."""
        for position, tensor in enumerate(inputs):
            state = self._memory.get(address_of(tensor))
            if state is not None and tensor.numel():
                names = self._program.names
                raise InputError(
                    f"{names[position]} shares memory with the model's own "
                    f"{names[len(inputs) + state]}, which the model writes",
                    fix=f"pass {names[position]}.clone()",
                )

    def _write_back(
        self,
        inputs: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
    ) -> None:
        """Copy values that the code could not write in place to the caller's tensors."""
        with torch.no_grad():
            for position in self._program.written:
                if position < len(inputs):
                    given, used = inputs[position], tensors[position]
                    # The input was copied to another layout, so the code wrote to the copy.
                    if given.data_ptr() != used.data_ptr():
                        given.copy_(used)
            for output, position in self._program.late:
                tensors[position].copy_(results[output])
