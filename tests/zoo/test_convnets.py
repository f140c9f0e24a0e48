"""The convolutional networks: their real sizes, and what PT2E makes of them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from tests.support.graphs.tiny_models import TINY, TINY_CONVNETS, tiny
from torch import nn

from qfuse.zoo.convnets import FAMILIES
from qfuse.zoo.convnets.shufflenet import shuffled
from qfuse.zoo.convnets.sizes import multiple_of_8
from qfuse.zoo.recipes import quantize

# What the networks are published with, for 1000 classes (U-Net: two).
PARAMETERS: Mapping[str, int] = MappingProxyType(
    {
        "resnet": 25_557_032,
        "resnet18": 11_689_512,
        "mobilenet": 3_504_872,
        "mobilenet-v3": 5_483_032,
        "efficientnet": 5_288_548,
        "shufflenet": 2_278_604,
        "densenet": 7_978_856,
        "unet": 31_037_698,
        "convnext": 28_589_128,
    }
)


def test_every_convnet_is_tested() -> None:
    assert set(FAMILIES) == set(TINY_CONVNETS)
    assert set(FAMILIES) < set(TINY)


@pytest.mark.parametrize("name", PARAMETERS)
def test_by_default_a_network_has_its_published_size(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES[name]
    # Without data: drawing the weights would take seconds.
    module = sys.modules[family.module.__module__]
    monkeypatch.setattr(module, "trained_like", lambda model, _: model)
    with torch.device("meta"):
        model = family.module(family.sizes())
    assert sum(value.numel() for value in model.parameters()) == PARAMETERS[name]


def test_channels_are_shuffled_between_the_halves() -> None:
    x = torch.arange(6.0).reshape(1, 6, 1, 1)
    assert shuffled(x).flatten().tolist() == [0, 3, 1, 4, 2, 5]
    assert torch.equal(shuffled(x.expand(2, 6, 3, 4))[1, :, 2, 3], shuffled(x).flatten())


def test_channels_are_rounded_as_in_the_mobilenets() -> None:
    assert [multiple_of_8(c) for c in (1, 11, 12, 16, 18, 60, 224.4)] == [
        8,
        16,
        16,
        16,
        24,
        64,
        224,
    ]


@pytest.mark.parametrize("name", TINY_CONVNETS)
def test_signals_neither_vanish_nor_explode(name: str) -> None:
    model, spreads = tiny(name), []

    def note(_: nn.Module, __: Any, y: torch.Tensor) -> None:
        spreads.append(float(y.std()))

    layers = [m for m in model.module.modules() if isinstance(m, (nn.Conv2d, nn.BatchNorm2d))]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    with torch.no_grad():
        model.module(*model.args)
    for hook in hooks:
        hook.remove()
    assert len(spreads) >= len(layers)
    assert min(spreads) > 0.02
    assert max(spreads) < 50


# What is left of batch norms that follow no convolution, and what PT2E quantizes besides
# convolutions and linears.
LEFT_NORMS = {"densenet": 6}
BETWEEN = {
    "resnet": {"add_", "max_pool2d"},
    "shufflenet": {"cat", "max_pool2d"},
    "densenet": {"avg_pool2d", "cat", "max_pool2d"},
    "inception": {"cat", "max_pool2d"},
    "unet": {"max_pool2d"},
    "yolo": {"cat", "max_pool2d"},
}


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("name", BETWEEN)
def test_batch_norms_are_folded_and_joins_and_pools_are_quantized(name: str) -> None:
    model = tiny(name)
    quantized: Any = quantize(model.module, "w8a8-static", model.args).model
    names = Counter(str(node.target).split(".")[-2] for node in calls(quantized))
    assert names["batch_norm"] == LEFT_NORMS.get(name, 0)
    between = {
        str(node.target).split(".")[-2]
        for node in calls(quantized)
        if any("dequantize" in source.name for source in node.all_input_nodes)
    }
    assert BETWEEN[name] <= between, between


def calls(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The calls of operators."""
    return [n for n in module.graph.nodes if n.op == "call_function" and "." in str(n.target)]
