"""Rotary positions of queries and keys: computed on both at once where that saves a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import qfuse
from qfuse import zoo
from qfuse.ir.events import MissCode
from qfuse.targets import Target
from qfuse.zoo import recipes

pytestmark = pytest.mark.zoo


def compiled(kv_heads: int, layers: int, recipe: str) -> tuple[Any, Any, Any]:
    """Build a small llama, quantize it and compile it without C++."""
    model = zoo.build(
        "llama",
        layers=layers,
        hidden=64,
        intermediate=160,
        vocab=97,
        heads=4,
        kv_heads=kv_heads,
        seq=6,
    )
    quantized = recipes.quantize(model.module, recipe, model.args, model.kwargs)
    options = {"backend": "eager"}
    fast = qfuse.compile(
        quantized.model,
        model.args,
        model.kwargs,
        target=Target.for_testing(),
        check="site",
        options=options,
    )
    return model, quantized, fast


@pytest.mark.numeric
@pytest.mark.parametrize("recipe", ["w8a8-dynamic", "w8a16"])
def test_queries_and_keys_are_rotated_at_once_in_every_layer(recipe: str) -> None:
    _, _, one = compiled(4, 1, recipe)
    model, quantized, fast = compiled(4, 2, recipe)
    assert [f.report.fired["sink-split"] for f in (one, fast)] == [1, 2]
    assert one.report.rolled_back == fast.report.rolled_back == ()
    args, kwargs = model.inputs(seed=1)
    with torch.no_grad():
        want, got = quantized.model(*args, **kwargs), fast(*args, **kwargs)
    noise = (got - want).double().square().mean() / want.double().square().mean()
    assert noise < 1e-3, "30 dB: a few flipped codes, not another function"


def test_keys_that_are_repeated_are_rotated_where_they_are_read() -> None:
    _, _, fast = compiled(2, 1, "w8a8-dynamic")

    assert fast.report.fired["sink-split"] == 0
    missed = [e for e in fast.report.closest_misses if e.rule == "sink-split"]
    assert [e.code for e in missed] == [MissCode.PROFIT]
