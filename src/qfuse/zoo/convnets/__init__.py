"""Convolutional networks: classifiers, a segmenter and a detector."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from qfuse.zoo.convnets import (
    convnext,
    densenet,
    efficientnet,
    inception,
    mobilenet_v2,
    mobilenet_v3,
    resnet,
    shufflenet,
    unet,
    yolo,
)
from qfuse.zoo.family import Family

__all__ = ["FAMILIES"]

FAMILIES: Mapping[str, Family[Any]] = MappingProxyType(
    {
        "resnet": resnet.RESNET50,
        "resnet18": resnet.RESNET18,
        "mobilenet": mobilenet_v2.FAMILY,
        "mobilenet-v3": mobilenet_v3.FAMILY,
        "efficientnet": efficientnet.FAMILY,
        "shufflenet": shufflenet.FAMILY,
        "densenet": densenet.FAMILY,
        "inception": inception.FAMILY,
        "unet": unet.FAMILY,
        "convnext": convnext.FAMILY,
        "yolo": yolo.FAMILY,
    }
)
"""By name, in the order of lists."""
