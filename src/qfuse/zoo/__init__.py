"""Built-in models and quantization recipes, usable without a download."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from qfuse.ir.errors import OptionsError
from qfuse.zoo import bert, convnets, llama, minilm, vit, whisper
from qfuse.zoo.family import Family, ZooModel

__all__ = ["ZooModel", "build", "describe", "names"]

_FAMILIES: Mapping[str, Family[Any]] = MappingProxyType(
    {
        "llama": llama.PREFILL,
        "llama-decode": llama.DECODE,
        "bert": bert.FAMILY,
        "vit": vit.FAMILY,
        "whisper-encoder": whisper.FAMILY,
        **convnets.FAMILIES,
        "minilm": minilm.FAMILY,
    }
)


def names() -> tuple[str, ...]:
    """Return the valid names for `build`."""
    return tuple(_FAMILIES)


def describe(name: str) -> str:
    """Return a one-line description of a model, without building it."""
    return _family(name).description


def build(name: str, **sizes: object) -> ZooModel:
    """Build a model of the zoo.

    Args:
        name: One of `names()`.
        **sizes: Sizes other than the family's defaults, as values or as text ("bfloat16", "2").

    Raises:
        OptionsError: The model or a size is unknown, or the sizes are inconsistent.
        QfuseError: A package that the model needs is missing.
    """
    return _family(name).build(name, sizes)


def _family(name: str) -> Family[Any]:
    if name not in _FAMILIES:
        near = difflib.get_close_matches(name, _FAMILIES, n=1)
        guess = f"did you mean {near[0]}? " if near else ""
        raise OptionsError(
            f"the zoo has no model {name!r}", fix=f"{guess}it has {', '.join(_FAMILIES)}"
        )
    return _FAMILIES[name]
