"""The models of the zoo at sizes that build in milliseconds, and how far two answers are apart."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from qfuse import zoo
from qfuse.zoo.family import ZooModel

_TEXT = {"layers": 1, "hidden": 64, "heads": 4, "intermediate": 96, "batch": 2}
_LLAMA = _TEXT | {"kv_heads": 2, "vocab": 128, "seq": 12}
_IMAGES = {"image": 32, "classes": 10, "batch": 2}

TINY_CONVNETS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "resnet": _IMAGES | {"width": 8, "depths": (1, 1)},
        "resnet18": _IMAGES | {"width": 8, "depths": (1, 1, 1)},
        "mobilenet": _IMAGES | {"multiplier": 0.35},
        "mobilenet-v3": _IMAGES | {"multiplier": 0.25, "depth": 1},
        "efficientnet": _IMAGES | {"multiplier": 0.25, "depth": 1},
        "shufflenet": _IMAGES | {"width": 16, "depths": (2, 1), "head": 32},
        "densenet": _IMAGES | {"growth": 8, "depths": (2, 2)},
        "inception": _IMAGES | {"multiplier": 0.125, "depths": (1, 1)},
        "unet": _IMAGES | {"classes": 2, "width": 8, "levels": 2},
        "convnext": _IMAGES | {"width": 16, "depths": (1, 1)},
        "yolo": _IMAGES | {"image": 64, "classes": 2, "width": 8},
    }
)

TINY: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "llama": _LLAMA,
        "llama-decode": _LLAMA,
        "bert": _TEXT | {"vocab": 128, "seq": 12},
        "vit": _TEXT | _IMAGES | {"patch": 8},
        "whisper-encoder": _TEXT | {"mels": 16, "positions": 20},
        **TINY_CONVNETS,
        "minilm": {"batch": 2, "seq": 12},
    }
)


class TwoLinears(nn.Module):
    """64 -> 128 -> 32, with a bias in the first only."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = torch.relu(self.up(x))
        out: torch.Tensor = self.down(hidden)
        return out


@functools.cache
def tiny(name: str) -> ZooModel:
    """Build a model once per process. Nothing may change it: the tests of the recipes check that."""
    return zoo.build(name, **TINY[name])


def flat(answer: object) -> torch.Tensor:
    """All numbers of a model's answer, whatever its structure, in float32."""
    leaves = [leaf for leaf in pytree.tree_leaves(answer) if isinstance(leaf, torch.Tensor)]
    return torch.cat([leaf.flatten().float() for leaf in leaves])


def sqnr(reference: object, answer: object) -> float:
    """Signal to quantization noise in decibels."""
    signal, noise = flat(reference), flat(reference) - flat(answer)
    power = noise.square().mean().item()
    return 10 * math.log10(signal.square().mean().item() / power) if power else math.inf
