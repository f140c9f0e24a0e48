"""Small models of the zoo, quantized and compiled once in a process: nothing in them changes."""

from __future__ import annotations

from collections import Counter
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
