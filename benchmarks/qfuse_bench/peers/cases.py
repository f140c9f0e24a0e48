"""The measured models, with the sizes of the tables, and recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from qfuse import zoo
from qfuse.ir.errors import OptionsError
from qfuse_bench.harness.worker import Inputs


@dataclass(frozen=True, slots=True)
class Case:
    """A model of the zoo at one size.

    Attributes:
        name: The name in tables and options.
        model: Name in the zoo.
        what: The size in words.
        sizes: Where it differs from the zoo's default.
        seeds: Of the inputs on which answers are compared. A model that writes a cache where its
            inputs say answers alike again only if they say one place.
        recipes: Names out of :data:`RECIPES` that quantize more than a layer of it; none is all.
    """

    name: str
    model: str
    what: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1)
    recipes: tuple[str, ...] = ()

    def takes(self, recipe: str) -> bool:
        """Return whether a recipe quantizes more than a layer of the model."""
        return not self.recipes or recipe in self.recipes


_CONVNETS = (
    ("resnet50", "resnet", "ResNet-50", 224),
    ("resnet18", "resnet18", "ResNet-18", 224),
    ("mobilenet-v2", "mobilenet", "MobileNetV2", 224),
    ("mobilenet-v3", "mobilenet-v3", "MobileNetV3-Large", 224),
    ("efficientnet", "efficientnet", "EfficientNet-B0", 224),
    ("shufflenet", "shufflenet", "ShuffleNetV2", 224),
    ("densenet", "densenet", "DenseNet-121", 224),
    ("inception", "inception", "GoogLeNet", 224),
    ("unet", "unet", "U-Net", 256),
    ("convnext", "convnext", "ConvNeXt-T", 224),
    ("yolo", "yolo", "a YOLO-like detector", 640),
)
_BATCHES = (1, 8)

CONVNETS: Mapping[str, Case] = MappingProxyType(
    {
        f"{name}-b{batch}": Case(
            f"{name}-b{batch}",
            model,
            f"{what}, {batch} x {image} x {image} pixels",
            {"batch": batch},
            recipes=("static",),
        )
        for name, model, what, image in _CONVNETS
        for batch in _BATCHES
    }
)
"""Convolutional networks of their published sizes, by name. Recipes of linears leave them float."""

CASES: Mapping[str, Case] = MappingProxyType(
    {
        case.name: case
        for case in (
            Case("minilm", "minilm", "6 layers, 16 sentences x 64 tokens", {"batch": 16}),
            Case(
                "llama-prefill",
                "llama",
                "4 layers, hidden 1024, 16 heads over 8, prompt of 256 tokens",
            ),
            Case(
                "llama-decode",
                "llama-decode",
                "the same, one token, key-value cache of 256",
                seeds=(0,),
            ),
            Case("llama-token", "llama", "the same, one token, no cache", {"seq": 1}),
            Case("bert", "bert", "4 layers, hidden 768, 4 x 128 tokens"),
            Case("vit", "vit", "4 layers, hidden 768, 1 x 224 x 224 pixels"),
            Case(
                "whisper",
                "whisper-encoder",
                "encoder, 4 layers, hidden 512, 30 s of speech",
                {"layers": 4},
            ),
            *CONVNETS.values(),
        )
    }
)
"""By name, in the order of the tables."""

USUAL_CASES = tuple(name for name in CASES if name not in CONVNETS)
"""The default selection."""

RECIPES: Mapping[str, str] = MappingProxyType(
    {
        "static": "w8a8-static",
        "dynamic": "w8a8-dynamic",
        "weight-only": "w8a16",
        "w4a8": "w4a8",
        "w4a8-g64": "w4a8",
        "w4a8-g128": "w4a8",
        "w4a16": "w4a16",
        "w4a16-g64": "w4a16",
        "w4a16-g128": "w4a16",
    }
)
"""What the tables call a recipe, and the zoo's name for it."""

GROUP_SIZES: Mapping[str, int] = MappingProxyType(
    {name: int(name.rpartition("-g")[2]) for name in RECIPES if "-g" in name}
)
"""Weights per scale, where it is not the recipe's default."""

USUAL_RECIPES = tuple(name for name in RECIPES if name not in GROUP_SIZES)
"""The default selection."""


def example_inputs(case: Case, seeds: Sequence[int]) -> list[Inputs]:
    """Return inputs for a case, one per seed, in float32."""
    built = zoo.build(case.model, **case.sizes)
    return [built.inputs(seed) for seed in seeds]


def pick(wanted: Sequence[str], known: Mapping[str, object], what: str) -> list[str]:
    """Return the wanted names, or all for none.

    Raises:
        OptionsError: One of them does not exist.
    """
    for name in wanted:
        if name not in known:
            raise OptionsError(f"unknown {what} {name!r}", fix=f"there are {', '.join(known)}")
    return list(wanted or known)
