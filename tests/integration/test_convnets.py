"""Whole convolutional networks: the same values, strides and calls as before."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from tests.support.graphs.tiny_models import TINY_CONVNETS, sqnr, tiny
from tests.support.sources.dialects import strides

import qfuse
from qfuse.ir.graph.schema import is_call
from qfuse.targets import Target
from qfuse.zoo import recipes

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.numeric,
    pytest.mark.own_kernels,
    # From torch's own code, when a graph that torch.export made is copied.
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]

# A few values that round to the next step, not another function.
LEAST = 30.0
# An input that differs by this much rounds a few values of a source to the next step.
STEP = 1e-5
# Rounding differs in every layer, and not in the first alone: four times the noise.
LAYERS = 6.0
# They take longest.
LARGE = ("yolo", "efficientnet", "mobilenet")


@cache
def compiled(
    name: str, recipe: str = "w8a8-static", *, dynamic: bool = False, **layout: Any
) -> tuple[Any, torch.nn.Module, qfuse.CompiledModel]:
    """Quantize a small network and compile it without a backend; return it with its source."""
    model = tiny(name)
    calibration = [(model.args, model.kwargs), model.inputs(1)]
    shapes = model.dynamic_shapes if dynamic else None
    args = tuple(x.to(**layout) for x in model.args)
    source = recipes.quantize(model.module, recipe, args, {}, shapes, calibration).model
    fast = qfuse.compile(
        source,
        args,
        dynamic_shapes=shapes,
        target=Target.for_testing(),
        check="site",
        options={"backend": "eager"},
    )
    assert fast.report.rolled_back == ()
    assert not [note.text for note in fast.report.notes if "which is a bug" in note.text]
    assert all(check.passed for check in fast.report.checks)
    return model, source, fast


def assert_alike(source: torch.nn.Module, fast: qfuse.CompiledModel, x: torch.Tensor) -> None:
    """Assert that two calls give what the source gives, and leave the input as it was."""
    before = x.clone()
    with torch.no_grad():
        expected = source(x)
        least = min(LEAST, sqnr(expected, source(x * (1 + STEP))) - LAYERS)
        answers = [fast(x), fast(x)]
    for answer in answers:
        assert answer.dtype == expected.dtype
        assert answer.shape == expected.shape
        assert strides(answer) == strides(expected)
        assert sqnr(expected, answer) > least
    assert torch.equal(*answers)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.thorough) if n in LARGE else n for n in TINY_CONVNETS],
)
def test_a_convnet_has_the_values_of_its_source(name: str) -> None:
    model, source, fast = compiled(name)
    assert_alike(source, fast, model.inputs(2)[0][0])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["resnet18", "unet", "mobilenet-v3"])
def test_images_may_be_channels_last(name: str) -> None:
    model, source, fast = compiled(name, memory_format=torch.channels_last)
    x = model.inputs(2)[0][0].to(memory_format=torch.channels_last)
    assert_alike(source, fast, x)


@pytest.mark.parametrize("name", ["resnet", "shufflenet", "unet"])
def test_the_batch_may_vary(name: str) -> None:
    model, source, fast = compiled(name, dynamic=True)
    for batch in (1, 3):
        assert_alike(source, fast, model.inputs(2, batch=batch)[0][0])


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("resnet", "w8a8-static-bf16"), ("resnet", "pt2e-dynamic"), ("convnext", "w8a8-static-bf16")],
)
def test_other_recipes(name: str, recipe: str) -> None:
    model, source, fast = compiled(name, recipe)
    assert_alike(source, fast, model.inputs(2)[0][0])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["resnet", "resnet18", "mobilenet"])
def test_residuals_under_autocast_are_read_as_they_are_stored(name: str) -> None:
    _, _, fast = compiled(name, "w8a8-static-bf16")

    made = [
        node.meta["val"].dtype
        for node in fast.plan.lowered.graph.nodes
        if str(node.target).startswith("qfuse.convolution")
    ]
    assert len(made) > 8
    assert set(made) == {torch.uint8}


@pytest.mark.parametrize(
    "name", ["mobilenet-v3", pytest.param("efficientnet", marks=pytest.mark.thorough)]
)
def test_squeeze_excite_copies_no_image(name: str) -> None:
    _, _, fast = compiled(name)

    nodes = fast.plan.lowered.graph.nodes
    copies = [node for node in nodes if is_call(node, torch.ops.aten.clone.default)]
    (only,) = copies
    assert only.meta["val"].shape[1] == 3, "the image that enters the network"
