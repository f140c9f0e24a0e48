"""Quantizing linear layers, mostly with torchao's `quantize_`: which ones, and why not others."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qfuse.zoo import _torchao_api as ao
from qfuse.zoo.family import Example
from qfuse.zoo.notes import Note, Outcome, group_notes

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_OUTSIDE = {
    "Embedding": "an embedding is a table that is looked up, not multiplied: it stays float",
    "EmbeddingBag": "an embedding is a table that is looked up, not multiplied: it stays float",
    "MultiheadAttention": "it reads its projection weights directly, not through linear layers",
}


def _symmetric(peak: torch.Tensor) -> torch.Tensor:
    """Return a scale as torchao chooses it for int8: of the middle of the range [-128, 127]."""
    return (peak / 127.5).clamp(min=torch.finfo(torch.float32).eps)


@dataclass(frozen=True)
class LinearScheme:
    """A way to quantize linear layers.

    Attributes:
        config: Gives torchao's config; takes the activation scale if `static`.
        group_size: Weights per scale along in_features, or None for whole channels.
        rows: What out_features has to be a multiple of.
        static: Whether the activation scale is measured beforehand.
        swap: Makes the quantized layer of a layer and its activation scale, if torchao does not.
        scale_of: Gives the activation scale from the greatest magnitude that was measured.
    """

    config: Callable[..., Any] | None = None
    group_size: int | None = None
    rows: int = 1
    static: bool = False
    swap: Callable[[nn.Linear, torch.Tensor | None], nn.Module] | None = None
    scale_of: Callable[[torch.Tensor], torch.Tensor] = _symmetric


def quantize_with(scheme: LinearScheme, model: nn.Module, examples: Iterable[Example]) -> Outcome:
    """Quantize the linear layers of a copy of `model`, in eval mode."""
    with ao.loaded():
        quantized = copy.deepcopy(model).eval()
        linears = {
            name: part for name, part in quantized.named_modules() if isinstance(part, nn.Linear)
        }
        left = {name: reason for name, part in linears.items() if (reason := _misfit(scheme, part))}
        scales: Mapping[str, torch.Tensor] = {}
        if scheme.static:
            names = linears.keys() - left.keys()
            scales, unmeasured = _measure(scheme, model, names, examples)
            left |= unmeasured
        chosen = {name: part for name, part in linears.items() if name not in left}
        twins = _twins(quantized, chosen)
        if scheme.swap is not None:
            _swap(scheme.swap, quantized, chosen, scales)
        else:
            assert scheme.config is not None, "a scheme has a config, or makes layers itself"
            _configure(scheme.config, quantized, chosen, scales if scheme.static else None)
            # A static scale of the activation is part of the weight, so such weights differ.
            if not scheme.static:
                _tie(chosen, twins)
        notes = group_notes(left.items()) + _tied_notes(chosen, twins) + _other_weights(quantized)
    return Outcome(quantized, len(chosen), notes)


def _configure(
    config: Callable[..., Any],
    model: nn.Module,
    chosen: Mapping[str, nn.Linear],
    scales: Mapping[str, torch.Tensor] | None,
) -> None:
    """Quantize the chosen layers of `model` with torchao, each with its scale if there are any."""
    if scales is None:
        ao.quantize_linears(model, frozenset(chosen), config())
        return
    for name in chosen:
        # A config of torchao has one activation scale, so each layer gets a config of its own.
        ao.quantize_linears(model, frozenset({name}), config(scales[name]))


def _swap(
    make: Callable[[nn.Linear, torch.Tensor | None], nn.Module],
    model: nn.Module,
    chosen: Mapping[str, nn.Linear],
    scales: Mapping[str, torch.Tensor],
) -> None:
    """Put a layer that `make` made in the place of each chosen one.

    A layer that is in several places stays one, and so does a weight that several layers have.
    """
    made: dict[int, nn.Module] = {}
    weights: dict[int, nn.Module] = {}
    for name, linear in chosen.items():
        if id(linear) not in made:
            layer = made[id(linear)] = make(linear, scales.get(name))
            first = weights.setdefault(id(linear.weight), layer)
            for part in ("weight", "weight_scale", "weight_outer_scale"):
                setattr(layer, part, getattr(first, part))
    for name, part in list(model.named_modules(remove_duplicate=False)):
        if id(part) in made:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, made[id(part)])


def _misfit(scheme: LinearScheme, linear: nn.Linear) -> str | None:
    """Return why the scheme cannot take this layer, or None."""
    weight = dict(linear.named_parameters(recurse=False)).get("weight")
    if weight is None:
        return "its weight is computed (a parametrization), so it cannot be replaced"
    if ao.is_quantized(weight):
        return "it is quantized already"
    if isinstance(linear, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "MultiheadAttention reads this layer's weight directly"
    if weight.dtype not in _FLOATS:
        return f"weights of {weight.dtype} are not supported"
    return _misshape(scheme, linear)


def _misshape(scheme: LinearScheme, linear: nn.Linear) -> str | None:
    if scheme.group_size and linear.in_features % scheme.group_size:
        return f"in_features is not a multiple of the group size {scheme.group_size}"
    if linear.out_features % scheme.rows:
        return f"out_features is not a multiple of {scheme.rows}"
    if linear.in_features == 1:
        # It mistakes the blocks [1, 1] of a column for one block, and torch's int8 product, which
        # rejects the strides of a column, would return uninitialized memory.
        return "torchao cannot quantize a weight with one input feature"
    return None


def _measure(
    scheme: LinearScheme, model: nn.Module, names: Iterable[str], examples: Iterable[Example]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the activation scale of each layer, and why the rest have none.

    The scale has the rank of the activation, as torchao demands; so a layer that is called with
    several ranks cannot have one.
    """
    watched = copy.deepcopy(model).eval()  # calls may write to buffers, such as a cache
    greatest: dict[str, torch.Tensor] = {}
    ranks: dict[str, set[int]] = defaultdict(set)

    def watch(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            peak = inputs[0].detach().abs().amax().float()
            greatest[name] = torch.maximum(greatest.get(name, peak), peak)
            ranks[name].add(inputs[0].dim())

        return hook

    names = list(names)
    for name in names:
        watched.get_submodule(name).register_forward_pre_hook(watch(name))
    with torch.no_grad():
        for args, kwargs in examples:
            watched(*args, **kwargs)
    left = {name: "calibration never called it" for name in names if name not in greatest}
    left |= {
        name: "it is called with activations of different ranks"
        for name, seen in ranks.items()
        if len(seen) > 1
    }
    scales = {
        # Only layers with one rank are left.
        name: scheme.scale_of(greatest[name]).reshape([1] * min(ranks[name]))
        for name in names
        if name not in left
    }
    return scales, left


def _twins(model: nn.Module, chosen: Mapping[str, nn.Linear]) -> dict[str, list[str]]:
    """Return, for each layer, the other places of the model that hold the very same weight."""
    owners: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # The model may be a linear itself, whose name is empty.
        owners[id(parameter)].append(f".{name}".removesuffix(".weight").removeprefix("."))
    return {
        name: [owner for owner in owners[id(linear.weight)] if owner != name]
        for name, linear in chosen.items()
    }


def _tie(chosen: Mapping[str, nn.Linear], twins: Mapping[str, list[str]]) -> None:
    """Give layers that shared one weight one quantized weight."""
    done = set()
    for name, linear in chosen.items():
        done.add(name)
        for twin in twins[name]:
            if twin in chosen and twin not in done:
                chosen[twin].weight = linear.weight


def _tied_notes(
    chosen: Mapping[str, nn.Linear], twins: Mapping[str, list[str]]
) -> tuple[Note, ...]:
    return group_notes(
        (twin, f"it shares its weight with {name}, and keeps the float copy")
        for name in chosen
        for twin in twins[name]
        if twin not in chosen
    )


def _other_weights(model: nn.Module) -> tuple[Note, ...]:
    """Say which parts with weights of their own are not linear layers."""
    found = []
    for name, part in model.named_modules():
        own = part.named_parameters(recurse=False)
        if not isinstance(part, nn.Linear) and any(value.dim() > 1 for _, value in own):
            kind = type(part).__name__
            reason = f"{kind}: this recipe quantizes linear layers only"
            found.append((name or kind, _OUTSIDE.get(kind, reason)))
    return group_notes(found)
