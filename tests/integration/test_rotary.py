"""Rotary positions of queries and keys: computed on both at once where that saves a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.sources.zoo_models import SMALL, compiled

import qfuse
from qfuse import zoo
from qfuse.ir.events import MissCode
from qfuse.targets import Target
from qfuse.zoo import recipes

pytestmark = pytest.mark.zoo


def unshared(layers: int, recipe: str) -> tuple[Any, Any, Any]:
    """Build a small llama with a key per query, quantize it and compile it without C++."""
    model = zoo.build("llama", layers=layers, **{**SMALL["llama"], "kv_heads": 4})
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
    _, _, one = unshared(1, recipe)
    model, quantized, fast = unshared(2, recipe)
    assert [f.report.fired["sink-split"] for f in (one, fast)] == [1, 2]
    assert one.report.rolled_back == fast.report.rolled_back == ()
    args, kwargs = model.inputs(seed=1)
    with torch.no_grad():
        want, got = quantized.model(*args, **kwargs), fast(*args, **kwargs)
    noise = (got - want).double().square().mean() / want.double().square().mean()
    assert noise < 1e-3, "30 dB: a few flipped codes, not another function"


def test_keys_that_are_repeated_are_rotated_where_they_are_read() -> None:
    _, _, fast = compiled("llama", "w8a8-dynamic", 1)

    assert fast.report.fired["sink-split"] == 0
    missed = [e for e in fast.report.closest_misses if e.rule == "sink-split"]
    assert [e.code for e in missed] == [MissCode.PROFIT]
