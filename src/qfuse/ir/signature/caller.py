"""Calls captured programs: binds arguments, checks guards, and rebuilds the nested result.

Interpreted and compiled graphs are both called through :class:`Caller`, so that they accept the
same calls, raise the same errors, and perform the writes of the source program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from qfuse.ir.graph.memory import write_values
from qfuse.ir.graph.stage_graph import Mutation, Signature
from qfuse.ir.signature._tree_api import unflatten
from qfuse.ir.signature.bind import Binder
from qfuse.ir.signature.guards import Guards
from qfuse.ir.signature.size_expr import parse_size


class Caller:
    """Calls graphs of one signature. Created once and used for every call, from any thread.

    A run is::

        leaves = caller.bind(args, kwargs)
        outputs = run(caller.check(leaves))
        return caller.finish(module, outputs, leaves)

    Attributes:
        signature: The signature.
        binder: What :meth:`bind` calls.
        guards: What :meth:`check` calls.
    """

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.binder = Binder(signature)
        self.guards = Guards(signature)
        # Parsed once, evaluated in every call.
        self._sized = {
            index: parse_size(spec.size)
            for index, spec in enumerate(signature.outputs)
            if spec.size is not None
        }

    def bind(self, args: Sequence[object], kwargs: Mapping[str, object]) -> list[Any]:
        """Return the flat leaves of a call, in the order of ``Signature.inputs``.

        Raises:
            InputError: An argument is missing, unexpected, given twice, or nested differently.
        """
        return self.binder.bind(args, kwargs)

    def check(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """Check every leaf and return the tensors for the placeholders, in order.

        The tensors are detached and have the captured layout; the leaves are not modified.

        Raises:
            InputError: A leaf does not match the captured signature.
        """
        return self.guards.check(leaves)

    def finish(self, module: GraphModule, outputs: Sequence[Any], leaves: Sequence[Any]) -> Any:
        """Perform the writes of the source program, and return its result.

        Args:
            module: Owner of the buffers that the program mutates.
            outputs: The graph's outputs, mutated values first.
            leaves: What :meth:`bind` returned.
        """
        return self.rebuild(self.write(module, outputs, leaves), leaves)

    def write(
        self, module: GraphModule, outputs: Sequence[Any], leaves: Sequence[Any]
    ) -> list[Any]:
        """Write the mutated values to their targets, and return the other outputs.

        A value or output that shares memory with a target is copied first, because in the graph all
        values precede the first write.
        """
        mutations = self.signature.mutations
        if not mutations:
            return list(outputs)
        targets = [_target(mutation, module, leaves) for mutation in mutations]
        written = write_values(targets, [m.output for m in mutations], outputs)
        return written[len(mutations) :]

    def rebuild(self, outputs: Sequence[Any], leaves: Sequence[Any]) -> Any:
        """Return the model's result from the graph's outputs after the mutated values."""
        sizes = self.guards.sizes(leaves) if self._sized else {}
        flat = []
        for position, spec in enumerate(self.signature.outputs):
            if spec.input_index is not None:
                # The caller's own object, since the source returns that and not an equal tensor.
                flat.append(leaves[spec.input_index])
            elif spec.index is not None:
                flat.append(outputs[spec.index])
            elif position in self._sized:
                flat.append(self._sized[position](sizes))
            else:
                flat.append(spec.constant)
        return unflatten(flat, self.signature.out_spec)


def _target(mutation: Mutation, module: GraphModule, leaves: Sequence[Any]) -> torch.Tensor:
    """Return the tensor that a mutation writes."""
    if mutation.buffer is not None:
        return module.get_buffer(mutation.buffer)
    assert mutation.input_index is not None, "a mutation writes a buffer or an input"
    target: torch.Tensor = leaves[mutation.input_index]
    return target
