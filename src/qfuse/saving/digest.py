"""Digests of what a compiled model computes, to compare machines and instruction sets."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from qfuse import kernels
from qfuse.ir.signature._tree_api import flat_leaves
from qfuse.ir.signature.caller import Caller
from qfuse.saving.save import uses_own_kernels
from qfuse.saving.storable import StorableModule

TORCH = "torch"
"""In place of an instruction set: the model does not call qfuse's own kernels."""


def digest_of(values: Iterable[object]) -> str:
    """Return the SHA-256 of values: of tensors the type, the shape and the bits in C order."""
    digest = hashlib.sha256()
    for value in values:
        if not isinstance(value, torch.Tensor):
            digest.update(f"{type(value).__name__} {value!r}\n".encode())
            continue
        digest.update(f"{value.dtype} {tuple(value.shape)}\n".encode())
        flat = value.detach().resolve_neg().resolve_conj().contiguous().flatten()
        if flat.numel():
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digests_of(
    model: StorableModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, str]:
    """Run copies of a model with each instruction set; return the digests of what they compute.

    That is their results, and the inputs and buffers that they write. Only qfuse's own kernels are
    switched: the rest of the model runs as it does on this machine.

    Args:
        model: The model; its state is not changed.
        args: Inputs, which are not changed either.
        kwargs: Keyword inputs.
    """
    if not uses_own_kernels(model.plan.lowered.graph):
        return {TORCH: _digest(model, args, kwargs)}
    found = {}
    for name in kernels.load().instruction_sets:
        with kernels.instruction_set(name):
            found[name] = _digest(model, args, kwargs)
    return found


def _digest(model: StorableModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    # Together, so that inputs that share memory still do.
    twin, given, named = copy.deepcopy(model), *copy.deepcopy((args, dict(kwargs)))
    caller = Caller(twin.signature)
    tensors = caller.check(caller.bind(given, named))
    results = flat_leaves(twin(*given, **named))
    return digest_of([*results, *twin.runner.written(tensors)])
