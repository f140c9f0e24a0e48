"""Run a graph as an AOTInductor package, with constants by pointer and in-place state updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from qfuse.backends import _inductor_api
from qfuse.backends.blocks.chain import CompiledChain, load_chain
from qfuse.backends.cache import CompiledCode
from qfuse.backends.eager import EagerRunner
from qfuse.backends.prepare import CallPlan
from qfuse.ir.errors import BackendError, InputError
from qfuse.ir.graph.memory import address_of
from qfuse.ir.signature.size_expr import parse_size


class AotiRunner:
    """Compiled code with its constants and state; thread-safe.

    Calls of several threads run at the same time, unless the code writes state of its own: then
    they take turns, and each sees what the one before wrote. Copies made by :meth:`fork` have their
    own state, and do not wait for each other.

    Attributes:
        plan: How the code is called.
        code: The compiled package, or several of them.
        constants: The constants that the code uses by pointer, including those of the compiler.
        otherwise: Runs the calls for which the code is wrong.
    """

    backend = "aoti"

    def __init__(
        self,
        plan: CallPlan,
        code: CompiledCode | CompiledChain,
        entry: Callable[[list[torch.Tensor]], list[torch.Tensor]],
        constants: dict[str, torch.Tensor],
        otherwise: EagerRunner,
    ) -> None:
        """Make a runner.

        Args:
            plan: How the code is called.
            code: The compiled package or packages, whose conditions can be parsed.
            entry: The loaded code, which any number of threads may call.
            constants: The constants that the code uses by pointer; kept alive here.
            otherwise: Runs the calls that do not satisfy the conditions, on the same state.
        """
        self.plan = plan
        self.code = code
        self.constants = constants
        self.otherwise = otherwise
        self._entry = entry
        self._conditions = tuple(map(parse_size, code.conditions))
        self._layouts = plan.layouts
        self._state = list(plan.state)
        self._memory = {address_of(t): i for i, t in enumerate(plan.state)}
        self._writes = bool(plan.written or plan.late)
        # `results[:-0]` would be empty.
        self._results = -len(plan.late) or None

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the code; see :meth:`qfuse.backends.Runner.run`."""
        # Inductor's code is wrong for these sizes, and says nothing.
        if self._conditions and not self._fits(inputs):
            return self.otherwise.run(inputs)
        tensors = [layout.place(x) for layout, x in zip(self._layouts, inputs, strict=True)]
        if not self._state:
            results = self._results_of(inputs, tensors)
        else:
            self._refuse_state(inputs)
            # Until the last write: calls that run op by op write the same state.
            with self.otherwise.turn:
                results = self._results_of(inputs, tensors + self._state)
        for output, position in self.plan.returned:
            results[output] = inputs[position]
        return results[: self._results]

    def _results_of(
        self, inputs: Sequence[torch.Tensor], tensors: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run the code, and write what it could not write itself."""
        results = self._call(tensors)
        if self._writes:
            results = self._without_shared_memory(tensors, results)
            self._write_back(inputs, tensors, results)
        return results

    def _call(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if not torch.is_autocast_enabled("cpu"):
            return self._entry(tensors)
        # The graph contains the casts of the source; autocast must not add others.
        with torch.autocast("cpu", enabled=False):
            return self._entry(tensors)

    def written(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what a run writes; see :meth:`qfuse.backends.Runner.written`."""
        return self.otherwise.written(inputs)

    def fork(self) -> AotiRunner:
        """Return a runner with its own copy of the state; code and constants are shared."""
        otherwise = self.otherwise.fork()
        names = self.plan.names[len(self._layouts) :]
        state = tuple(otherwise.module.get_buffer(name) for name in names)
        plan = replace(self.plan, state=state)
        return AotiRunner(plan, self.code, self._entry, self.constants, otherwise)

    def _fits(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether the sizes of a call satisfy the conditions of the code."""
        sizes = {s.name: inputs[s.position].shape[s.axis] for s in self.plan.sizes.values()}
        return all(holds(sizes) for holds in self._conditions)

    def _refuse_state(self, inputs: Sequence[torch.Tensor]) -> None:
        """Refuse inputs that alias the state: the code may write state before it loads inputs."""
        for position, tensor in enumerate(inputs):
            state = self._memory.get(address_of(tensor))
            if state is not None and tensor.numel():
                names = self.plan.names
                raise InputError(
                    f"{names[position]} shares memory with the model's own "
                    f"{names[len(inputs) + state]}, which the model writes",
                    fix=f"pass {names[position]}.clone()",
                )

    def _without_shared_memory(
        self, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return results that share no memory with what the code writes in place.

        Inductor writes a part of a tensor in place, removes a copy of the whole after it, and
        returns the tensor itself.
        """
        written = {address_of(tensors[position]) for position in self.plan.written} - {0}
        return [result.clone() if address_of(result) in written else result for result in results]

    def _write_back(
        self,
        inputs: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
    ) -> None:
        """Copy values that the code could not write in place to the caller's tensors."""
        with torch.no_grad():
            for position in self.plan.written:
                if position < len(inputs):
                    given, used = inputs[position], tensors[position]
                    # The input was copied to another layout, so the code wrote to the copy.
                    if given.data_ptr() != used.data_ptr():
                        given.copy_(used)
            for output, position in self.plan.late:
                tensors[position].copy_(results[output])


def load_runner(
    package: Path,
    code: CompiledCode,
    plan: CallPlan,
    constants: Mapping[str, torch.Tensor],
    otherwise: EagerRunner,
    runners: int,
) -> AotiRunner:
    """Load compiled code and return its runner.

    Args:
        package: A file with ``code.package``; it is not needed afterwards.
        code: The compiled package.
        plan: How the code is called.
        constants: The constants of the program, without those of the compiler.
        otherwise: Runs the calls for which the code is wrong.
        runners: How many threads may run the code at the same time; others wait.

    Raises:
        BackendError: The package cannot be loaded.
    """
    every = {**constants, **code.extras}
    try:
        entry = _inductor_api.load_package(package, every, runners)
    except (RuntimeError, KeyError) as error:
        raise BackendError(
            f"the compiled package cannot be loaded: {error}",
            fix="check that the folder for temporary files has space, and that libraries can be "
            "loaded from it (noexec)",
        ) from error
    return AotiRunner(plan, code, entry, every, otherwise)


def chain_runner(
    chain: CompiledChain,
    plan: CallPlan,
    constants: Mapping[str, torch.Tensor],
    otherwise: EagerRunner,
    runners: int,
) -> AotiRunner:
    """Load the compiled parts of a program and return their runner.

    Args:
        chain: The compiled parts.
        plan: How the program is called.
        constants: The constants of the program, without those of the compiler.
        otherwise: Runs the calls for which the code is wrong.
        runners: How many threads may run the code at the same time; others wait.

    Raises:
        BackendError: A part cannot be loaded.
    """
    every = {**constants, **chain.extras}
    return AotiRunner(plan, chain, load_chain(chain, every, runners), every, otherwise)
