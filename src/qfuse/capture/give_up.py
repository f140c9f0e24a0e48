"""Give up the weights of a source model, which a compiled model holds in another form."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.export import ExportedProgram

from qfuse.ir.errors import OptionsError
from qfuse.ir.graph.memory import address_of
from qfuse.ir.graph.stage_graph import CapturedGraph

_OPTION = "free_source=True gives up the weights of the source model"


def check_free_source(model: nn.Module | ExportedProgram) -> nn.Module:
    """Return ``model`` if its weights can be given up.

    Raises:
        OptionsError: It is a program, whose tensors others may hold, or not a module.
    """
    if isinstance(model, nn.Module):
        return model
    raise OptionsError(
        f"{_OPTION}, and {type(model).__name__} is not a module that could be left without them",
        fix="pass the module, or leave free_source out and delete the program afterwards",
    )


def give_up_weights(
    model: nn.Module, captured: CapturedGraph, state: Collection[torch.Tensor]
) -> int:
    """Put tensors without memory in the place of all parameters and buffers.

    Memory becomes free where only the model held the tensor: weights that are shared with another
    model stay there as they are. Calling ``model`` raises an error of torch about the device
    ``meta``.

    Args:
        model: The source model.
        captured: Its captured graph, which loses its constants.
        state: What the compiled model writes, which stays.

    Returns:
        How many tensors were given up.
    """
    # Empty tensors have the address 0, and share nothing.
    kept = {address_of(value) for value in state} - {0}
    count = 0
    for module in model.modules():
        held = (
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        )
        for name, value in held:
            # Tensors of a subclass have no memory of their own to ask for.
            if type(value) in {torch.Tensor, nn.Parameter} and address_of(value) in kept:
                continue
            empty = torch.empty(value.shape, dtype=value.dtype, device="meta")
            is_parameter = isinstance(value, nn.Parameter)
            setattr(module, name, nn.Parameter(empty, False) if is_parameter else empty)
            count += 1
    for name in dict(captured.module.named_buffers(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        delattr(captured.module.get_submodule(owner), leaf)
    return count
