"""The lint on models of the zoo: healthy recipes give no warning, and what it finds is there."""

from __future__ import annotations

from functools import cache

import pytest
from tests.support.sources.zoo_models import SMALL

import qfuse
from qfuse import zoo
from qfuse.analysis import LintFinding, Severity
from qfuse.targets import Target
from qfuse.zoo import recipes

pytestmark = [pytest.mark.zoo, pytest.mark.own_kernels, pytest.mark.thorough]

# Of these sizes int8 is not slower than float, as it is for those of the other tests.
WIDE: dict[str, object] = {"hidden": 256, "intermediate": 512, "layers": 1}


@cache
def warnings(name: str, recipe: str, **sizes: object) -> tuple[LintFinding, ...]:
    """Quantize a small model and return the warnings."""
    model = zoo.build(name, **sizes)
    quantized = recipes.quantize(model.module, recipe, model.args, model.kwargs)
    found = qfuse.lint(
        quantized.model, model.args, model.kwargs, target=Target.for_testing(isa="avx512_vnni")
    )
    return tuple(f for f in found if f.severity is Severity.WARNING)


@pytest.mark.parametrize(
    "recipe",
    [
        "w8a8-static",
        "w8a8-static-bf16",
        "w8a8-static-ao",
        "w8a8-dynamic",
        "pt2e-dynamic",
        "w8a8-group",
        "w4a8",
        "w4a16",
        "fp8-dynamic",
        "mxfp8",
        "nvfp4",
    ],
)
def test_recipes_for_a_language_model_are_healthy(recipe: str) -> None:
    found = warnings("llama", recipe, **SMALL["llama"] | WIDE | {"seq": 32})
    # PT2E quantizes both factors of the gate, which is computed in float.
    gate = {"pt2e-dynamic", "w8a8-static-bf16"}
    expected = {"never-computed-on"} if recipe in gate else set()
    assert {f.code for f in found} == expected, [str(f) for f in found]
    assert all("aten.mul" in f.seen for f in found)


@pytest.mark.parametrize("name", ["bert", "vit"])
@pytest.mark.parametrize("recipe", ["w8a8-static", "w8a8-static-ao", "w8a16", "w4a8"])
def test_encoders_are_healthy(name: str, recipe: str) -> None:
    found = warnings(name, recipe, **SMALL[name] | WIDE)
    # The pooler reads one row of each input, and is small.
    assert {f.place.module for f in found} <= {"pooler.dense", "vit.pooler.dense"}
    assert {f.code for f in found} <= {"small-layer"}


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("resnet18", set()),
        ("unet", set()),
        # What is left of a channel shuffle is quantized again, with the narrower range of a part.
        ("shufflenet", {"double-rounding"}),
        # The classifier quantizes the average again, with parameters of its own.
        ("mobilenet", {"double-rounding"}),
    ],
)
def test_convolutional_networks(name: str, codes: set[str]) -> None:
    found = warnings(name, "w8a8-static", image=64)
    assert {f.code for f in found} == codes, [str(f) for f in found]
