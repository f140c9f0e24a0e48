"""Register the caches of `transformers` as pytrees, so that they can be inputs and outputs.

torch.export flattens registered containers only. `transformers` registers its dynamic cache on
demand, with an unflatten function that runs operators, which a trace records; its static cache is
not registered at all. Here a layer is flattened to its tensors and its plain attributes, and
unflattening runs no operators.
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
# The cache classes, and their layers whose whole state is tensors that forward mutates or replaces.
_CACHES = {"DynamicCache": ("DynamicLayer",), "StaticCache": ("StaticLayer",)}
# Derived from the tensors when unflattening: as context they would fix the batch size.
_DERIVED = ("dtype", "device", "batch_size", "num_heads", "k_head_dim", "v_head_dim")


@dataclass(frozen=True)
class LayerContext:
    """The context of a layer: its class, and its attributes that are not tensors."""

    kind: type
    others: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class CacheContext:
    """The context of a cache."""

    kind: type
    layers: tuple[LayerContext, ...]
    others: tuple[tuple[str, Any], ...]


def register_caches() -> None:
    """Register the caches if `transformers` is imported and has not registered them."""
    module = sys.modules.get(_MODULE)
    for name in _CACHES:
        kind = getattr(module, name, None)
        if kind is not None:
            register_container(kind, _flatten, _build)


def verify_cache(name: str, value: object) -> None:
    """Refuse a cache argument that keeps state outside its tensors.

    Raises:
        CaptureError: A layer is not allocated yet, or keeps its length in Python.
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
                f"{name} is not allocated yet: forward would allocate it, outside the graph",
                fix=f"call {name}.early_initialization(batch_size, num_heads, head_dim, dtype, "
                "device) first",
            )


def note_cache(name: str, value: object) -> str | None:
    """Return a note for the user about a cache argument, or ``None``."""
    kind = type(value)
    if kind.__module__ != _MODULE or kind.__name__ != "DynamicCache":
        return None
    return (
        f"{name} is a DynamicCache, which forward updates by assigning new tensors: a compiled "
        "model does not change it. Use the cache in its result, or a StaticCache"
    )


def _flatten(cache: Any) -> tuple[dict[str, Any], CacheContext]:
    """Return the tensors of each layer by name, and the context."""
    pairs = [_split(layer) for layer in cache.layers]
    layers = tuple(
        LayerContext(type(layer), others)
        for layer, (_, others) in zip(cache.layers, pairs, strict=True)
    )
    fixed = tuple((name, v) for name, v in vars(cache).items() if name != "layers")
    return {"layers": [tensors for tensors, _ in pairs]}, CacheContext(type(cache), layers, fixed)


def _split(layer: Any) -> tuple[dict[str, torch.Tensor], tuple[tuple[str, Any], ...]]:
    """Return a layer's tensors and its other attributes, each sorted by name."""
    items = sorted(vars(layer).items())
    tensors = {name: value for name, value in items if isinstance(value, torch.Tensor)}
    # A layer without tensors has nothing to derive them from.
    derived = _DERIVED if tensors else ()
    others = tuple((n, v) for n, v in items if n not in tensors and n not in derived)
    return tensors, others


def _build(children: Sequence[Any], fixed: CacheContext) -> Any:
    layers = []
    for spec, tensors in zip(fixed.layers, children[0], strict=True):
        # Without `__init__`, which may run operators that the trace would record.
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
    """Set the attributes of a layer that are derived from its tensors."""
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor):
        return
    layer.dtype, layer.device = keys.dtype, keys.device
    if keys.ndim == values.ndim == 4:  # noqa: PLR2004
        layer.batch_size, layer.num_heads = keys.shape[:2]
        layer.k_head_dim, layer.v_head_dim = keys.shape[-1], values.shape[-1]
