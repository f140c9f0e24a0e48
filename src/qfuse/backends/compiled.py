"""The callable for users: binds and checks arguments, runs the graph, unflattens the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qfuse.backends.layout import dense_strides
from qfuse.backends.runner import Runner
from qfuse.ir.graph.stage_graph import Signature
from qfuse.ir.signature.caller import Caller


class CompiledModule:
    """A compiled model with the call signature of its source; thread-safe.

    Every input is checked before it reaches compiled code, which would misread a tensor of another
    dtype or shape. Inputs may have any strides; they are copied if the code needs others. Only the
    tensors that the source program mutates are written, in place. Results never require grad.

    In a forked child process (not one started by ``spawn``), use it only if the parent had not run
    parallel code before: the parent's OpenMP threads do not exist in the child, where torch itself
    hangs for the same reason.
    """

    def __init__(self, signature: Signature, runner: Runner) -> None:
        self.signature = signature
        self.runner = runner
        self._caller = Caller(signature)
        fed = [i for i, leaf in enumerate(signature.inputs) if leaf.placeholder is not None]
        written = [m.input_index for m in signature.mutations if m.input_index is not None]
        self._written = tuple((leaf, fed.index(leaf)) for leaf in written)
        made = [(s.index, s) for s in signature.outputs if s.input_index is None]
        self._strides = tuple({(i, s.strides) for i, s in made if i is not None and s.strides})
        self._orders = tuple({(i, s.order) for i, s in made if i is not None and s.order})

    @property
    def backend(self) -> str:
        """``aoti`` or ``eager``."""
        return self.runner.backend

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the model.

        Raises:
            InputError: The arguments do not match the captured signature; nothing was run.
        """
        leaves = self._caller.bind(args, kwargs)
        tensors = self._caller.check(leaves)
        outputs = self.runner.run(tensors)
        if self._written:
            self._write_back(leaves, tensors)
        # The caller gets the strides of the source model, whatever the code prefers.
        for index, strides in self._strides:
            outputs[index] = _restrided(outputs[index], strides)
        for index, order in self._orders:
            strides = dense_strides(outputs[index].shape, order)
            outputs[index] = _restrided(outputs[index], strides)
        return self._caller.rebuild(outputs, leaves)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        """Copy the mutable state; code and constants are immutable and shared."""
        copy = CompiledModule(self.signature, self.runner.fork())
        memo[id(self)] = copy
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a compiled graph cannot be pickled\n"
            "  do: pickle or save what qfuse.compile returns, which holds it"
        )

    def _write_back(self, leaves: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        """Copy values that were written to copies back to the caller's tensors."""
        with torch.no_grad():
            for leaf, position in self._written:
                given, used = leaves[leaf], tensors[position]
                if given.data_ptr() != used.data_ptr():
                    given.copy_(used)


def _restrided(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return ``value`` with ``strides``; a view where they differ for axes of size one only."""
    if value.stride() == strides or value.numel() == 0:
        return value
    pairs = zip(value.shape, value.stride(), strides, strict=True)
    if all(size == 1 or have == want for size, have, want in pairs):
        return value.as_strided(value.shape, strides)
    made = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    return made.copy_(value)
