"""The model of a command: loaded by name, and quantized if a recipe is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
import torch
from torch.export import ExportedProgram
from torch.nn import Module

from qfuse.cli.console import ERR
from qfuse.ir.errors import OptionsError
from qfuse.zoo import recipes
from qfuse.zoo.resolve import Loaded, load_model


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that is ready to be looked at.

    Attributes:
        loaded: The model as it was loaded, in float if a recipe was given.
        model: The model, quantized if a recipe was given.
        args: Positional example inputs.
        kwargs: Keyword example inputs.
    """

    loaded: Loaded
    model: Module | ExportedProgram
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def loading_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument MODEL and the options that say how it is quantized."""
    options = (
        click.argument("model"),
        click.option(
            "--quantize", type=click.Choice(recipes.names()), help="quantize with torchao first"
        ),
        click.option("--group-size", type=int, help="weights per scale; -1: a whole channel"),
        click.option(
            "--size", "sizes", multiple=True, metavar="NAME=VALUE", help="a size of the model"
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def load_quantized(
    model: str, quantize: str | None, group_size: int | None, sizes: Sequence[str]
) -> Prepared:
    """Load a model and quantize it; what the recipe leaves in float is printed.

    Raises:
        OptionsError: An option does not fit the model or the recipe.
    """
    loaded = load_model(model, parse_size_options(sizes))
    return Prepared(loaded, *quantize_loaded(loaded, quantize, None, group_size))


def parse_size_options(texts: Sequence[str]) -> dict[str, str]:
    """Parse the sizes of a model from texts of the form ``NAME=VALUE``."""
    sizes: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise OptionsError(f"--size {text!r} is not NAME=VALUE", fix="as in --size layers=2")
        sizes[name] = value
    return sizes


def quantize_loaded(
    loaded: Loaded, recipe: str | None, shapes: Any, group_size: int | None = None
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Quantize a model, print what was skipped, and return the model with its inputs.

    Without a recipe the model is returned as it is.
    """
    args, kwargs = loaded.args, dict(loaded.kwargs or {})
    if recipe is None:
        if group_size is not None:
            raise OptionsError("--group-size needs --quantize", fix="add --quantize, as in w4a8")
        return loaded.model, args, kwargs
    if isinstance(loaded.model, torch.export.ExportedProgram):
        raise OptionsError(
            "an exported program cannot be quantized",
            where=loaded.spec,
            fix="leave out --quantize, or quantize the module before exporting it",
        )
    quantized = recipes.quantize(
        loaded.model, recipe, args, kwargs, dynamic_shapes=shapes, group_size=group_size
    )
    for note in quantized.notes:
        ERR.print(f"not quantized: {note}", style="yellow", markup=False)
    return quantized.model, args, kwargs
