"""Random weights that behave like trained ones, so that a wrong rewrite changes the outputs.

A fresh `transformers` model has zero biases, unit norm weights, identity batch norms and, if it is
small, branches that vanish next to the residual stream: a compiler that dropped all of them would
still return nearly the right result. Here none of these is trivial.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block with torch's CPU generator seeded, and restore the generator afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@torch.no_grad()
def perturb(module: nn.Module, spread: float = 0.1) -> None:
    """Add noise to every bias and every norm weight, which are constants after initialization."""
    for part in module.modules():
        for name in ("weight", "bias"):
            value = getattr(part, name, None)
            if isinstance(value, nn.Parameter) and value.dim() == 1:
                value.add_(torch.randn_like(value) * spread)


@torch.no_grad()
def measure_batch_norms(module: nn.Module, batch: torch.Tensor) -> None:
    """Give every batch norm the statistics that `batch` really has there."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    norms = [part for part in module.modules() if isinstance(part, kinds)]
    for norm in norms:
        norm.reset_running_stats()
        # The norms alone: dropout stays off.
        norm.train()
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = None  # the average over all batches seen, which is this one
    module(batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()


def cast_weights(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return `module` with its weights in `dtype`.

    Buffers that are not saved with the model, such as rotary frequencies, are computed constants
    and not weights: `from_pretrained` leaves them in float32, and so does this.
    """
    saved = module.state_dict()
    constants = {name: value for name, value in module.named_buffers() if name not in saved}
    module.to(dtype)
    for name, value in constants.items():
        path, _, leaf = name.rpartition(".")
        module.get_submodule(path).register_buffer(leaf, value, persistent=False)
    return module
