"""Small models of the zoo, quantized and compiled once in a process: nothing in them changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch

import qfuse
from qfuse import zoo
from qfuse.targets import Target
from qfuse.zoo import recipes

SMALL: dict[str, dict[str, object]] = {
    "llama": {"hidden": 64, "intermediate": 160, "vocab": 97, "heads": 4, "kv_heads": 2, "seq": 6},
    "bert": {"hidden": 64, "intermediate": 128, "vocab": 97, "heads": 4, "seq": 6, "batch": 2},
    "vit": {"hidden": 64, "intermediate": 128, "heads": 4, "image": 32, "patch": 16, "batch": 2},
}


def compiled(
    name: str, recipe: str, layers: int, dtype: torch.dtype = torch.float32
) -> tuple[Any, Any, Any]:
    """Build a small model, quantize it and compile it without C++; return it with its source.

    Every site of a model of one layer is checked.
    """
    return _compiled(name, recipe, layers, dtype)


@cache
def _compiled(name: str, recipe: str, layers: int, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    model = zoo.build(name, layers=layers, dtype=dtype, **SMALL[name])
    quantized = recipes.quantize(model.module, recipe, model.args, model.kwargs)
    fast = qfuse.compile(
        quantized.model,
        model.args,
        model.kwargs,
        target=Target.for_testing(),
        check="site" if layers == 1 else "off",
        options={"backend": "eager"},
    )
    return model, quantized, fast


def kernels_of(report: qfuse.Report, op: str) -> Counter[str]:
    """How often each kernel was taken for an op."""
    return Counter(e.kernel for e in (*report.fused, *report.expanded) if e.place.op == op)


def grown_constants(source: torch.nn.Module, fast: Any) -> list[str]:
    """Return the constants that take more memory than the source's tensors that they are made of.

    A constant has the names of these in its own. A packed one may have less than a tile of padding for each.
    The others may replace source tensors that are gone, or are numbers of the source's code.
    """
    held = dict(_bytes([*source.named_parameters(), *source.named_buffers()]))
    constants = [
        (name.replace(".", "_"), value)
        for name, value in fast.plan.lowered.module.named_buffers()
        if value.layout is torch.strided
    ]
    grown, used, rest = [], set(), 0
    for name, value in constants:
        parts = [part for part in held if part in name]
        parts = [p for p in parts if not any(p != other and p in other for other in parts)]
        used.update(parts)
        takes = value.untyped_storage().nbytes()
        tile = takes // len(value) if name.endswith("_packed") else 0
        if parts and takes >= sum(held[part] for part in parts) + max(tile * len(parts), 1):
            grown.append(name)
        # One number of up to 8 bytes.
        rest += takes if not parts and value.numel() > 1 else 0
    if rest > sum(size for name, size in held.items() if name not in used):
        grown.append("those without a name of the source")
    return grown


def _bytes(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, int]]:
    """Yield the size of each tensor; of a tensor subclass those of the tensors that it holds."""
    for name, value in tensors:
        if hasattr(value, "__tensor_flatten__"):
            inner, _ = value.__tensor_flatten__()
            yield from _bytes((f"{name}_{part}", getattr(value, part)) for part in inner)
        else:
            yield name.replace(".", "_"), value.nbytes
