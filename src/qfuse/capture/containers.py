"""The caches of `transformers` as containers of tensors, so that they can be inputs and outputs.

torch.export looks into registered containers only. `transformers` registers its dynamic cache on
demand and in a way that runs operators whenever a cache is rebuilt, which a trace then records; its
static cache is not registered at all. Here a layer is its tensors and the plain values beside them,
and rebuilding one runs nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qfuse.capture._export_api import register_container
from qfuse.ir.errors import CaptureError

_MODULE = "transformers.cache_utils"
# The classes, and the layers whose whole state is tensors that forward writes or replaces.
_CACHES = {"DynamicCache": ("DynamicLayer",), "StaticCache": ("StaticLayer",)}
# Set from the tensors when a layer is rebuilt: they would tie the structure to one batch size.
_DERIVED = ("dtype", "device", "batch_size", "num_heads", "k_head_dim", "v_head_dim")


@dataclass(frozen=True)
class _Layer:
    """The fixed part of a layer: its class, and the attributes that are no tensors."""

    kind: type
    others: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class _Cache:
    """The fixed part of a cache."""

    kind: type
    layers: tuple[_Layer, ...]
    others: tuple[tuple[str, Any], ...]


def register_caches() -> None:
    """Make the caches known to torch, if `transformers` is in use and did not do so itself."""
    module = sys.modules.get(_MODULE)
    for name in _CACHES:
        kind = getattr(module, name, None)
        if kind is not None:
            register_container(kind, _flatten, _build)


def verify_cache(name: str, value: object) -> None:
    """Refuse a cache argument that keeps state outside its tensors.

    Raises:
        CaptureError: A layer is not allocated yet, or counts its length in Python.
    """
    kind = type(value)
    if kind.__module__ != _MODULE or kind.__name__ not in _CACHES:
        return
    for layer in getattr(value, "layers", ()):
        layer_kind = type(layer).__name__
        if layer_kind not in _CACHES[kind.__name__]:
            raise CaptureError(
                f"{name} has layers of class {layer_kind}, which keep their length in Python: "
                "a graph cannot update it",
                fix=f"use a {kind.__name__} of {_CACHES[kind.__name__][0]} layers",
            )
        if not layer.is_initialized and kind.__name__ == "StaticCache":
            raise CaptureError(
                f"{name} is not allocated yet: forward would do it, outside of any graph",
                fix=f"call {name}.early_initialization(batch_size, num_heads, head_dim, dtype, "
                "device) first",
            )


def note_cache(name: str, value: object) -> str | None:
    """Return what a user should know about a cache argument, ``None`` if there is nothing."""
    kind = type(value)
    if kind.__module__ != _MODULE or kind.__name__ != "DynamicCache":
        return None
    return (
        f"{name} is a DynamicCache, which forward updates by giving it new tensors: a compiled "
        "model leaves it as it is. Use the cache in its result, or a StaticCache"
    )


def _flatten(cache: Any) -> tuple[dict[str, Any], _Cache]:
    """Return the tensors of each layer by name, and everything else."""
    pairs = [_split(layer) for layer in cache.layers]
    layers = tuple(
        _Layer(type(layer), others) for layer, (_, others) in zip(cache.layers, pairs, strict=True)
    )
    fixed = tuple((name, v) for name, v in vars(cache).items() if name != "layers")
    return {"layers": [tensors for tensors, _ in pairs]}, _Cache(type(cache), layers, fixed)


def _split(layer: Any) -> tuple[dict[str, torch.Tensor], tuple[tuple[str, Any], ...]]:
    """Return a layer's tensors and its other attributes, each in the order of their names."""
    items = sorted(vars(layer).items())
    tensors = {name: value for name, value in items if isinstance(value, torch.Tensor)}
    derived = _DERIVED if tensors else ()
    others = tuple((n, v) for n, v in items if n not in tensors and n not in derived)
    return tensors, others


def _build(children: Sequence[Any], fixed: _Cache) -> Any:
    layers = []
    for spec, tensors in zip(fixed.layers, children[0], strict=True):
        layer: Any = object.__new__(spec.kind)
        vars(layer).update(spec.others)
        vars(layer).update(tensors)
        _derive(layer)
        layers.append(layer)
    cache: Any = object.__new__(fixed.kind)
    vars(cache).update(fixed.others)
    cache.layers = layers
    return cache


def _derive(layer: Any) -> None:
    """Set what a layer knows about its tensors."""
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor):
        return
    layer.dtype, layer.device = keys.dtype, keys.device
    if keys.ndim == values.ndim == 4:  # noqa: PLR2004
        layer.batch_size, layer.num_heads = keys.shape[:2]
        layer.k_head_dim, layer.v_head_dim = keys.shape[-1], values.shape[-1]
