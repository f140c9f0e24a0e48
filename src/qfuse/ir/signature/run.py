"""Interpret a graph of any stage on real tensors: the reference for all other executions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter

from qfuse.ir.errors import CaptureError, QfuseError
from qfuse.ir.graph.stage_graph import StageGraph
from qfuse.ir.signature.caller import Caller


def run_flat(module: GraphModule, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Return the graph's flat outputs, mutated values first, without performing writes.

    Autocast is disabled, because the graph contains every cast of its source.
    """
    devices = {"cpu", *(value.device.type for value in inputs)}
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for device in sorted(devices):
            if torch.amp.is_autocast_available(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        return tuple(Interpreter(module).run(*inputs))


def run_functional(
    program: StageGraph, *args: object, **kwargs: object
) -> tuple[tuple[torch.Tensor, ...], Any]:
    """Call ``program`` as its source is called: check, run, write, and rebuild the result.

    Returns:
        The mutated values in the order of ``Signature.mutations``, and the model's result.

    Raises:
        InputError: The call does not fit the signature.
    """
    caller = Caller(program.signature)
    leaves = caller.bind(args, kwargs)
    outputs = run_flat(program.module, caller.check(leaves))
    # Copy, because a value may be the buffer that is written next.
    written = tuple(value.clone() for value in outputs[: len(program.signature.mutations)])
    return written, caller.finish(program.module, outputs, leaves)


@contextmanager
def running_examples() -> Iterator[None]:
    """Say so if the model does not run on its example inputs.

    Raises:
        CaptureError: The block failed with an error of torch.
    """
    try:
        yield
    except QfuseError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        what, _, _ = str(error).partition("\n\nWhile executing")
        raise CaptureError(
            f"the model does not run on its example inputs: {what.strip()}",
            fix="check that model(*args, **kwargs) runs with these dtypes, shapes and values",
        ) from error
