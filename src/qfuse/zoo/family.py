"""Zoo models: sizes, example inputs, and dynamic axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.export import Dim

from qfuse.ir.errors import OptionsError
from qfuse.zoo._torchao_api import quiet_imports

Example = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments for one call of a model."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The options that every family has; families add their own.

    Attributes:
        batch: How many independent inputs the example holds.
        dtype: Dtype of the weights and of float inputs.
        seed: Seed of the random weights and of the example inputs.
    """

    batch: int = 1
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that are invalid for all models."""
        for field in fields(self):
            value = getattr(self, field.name)
            counts = value if isinstance(value, tuple) else (value,)
            least = 0 if field.name == "seed" else 1
            if any(isinstance(count, int) and count < least for count in counts):
                raise OptionsError(
                    f"size {field.name}={value} is too small",
                    fix=f"set {field.name} to at least {least}",
                )
        if not self.dtype.is_floating_point:
            raise OptionsError(
                f"a model cannot have weights of dtype {self.dtype}",
                fix="give dtype=float32 or dtype=bfloat16",
            )

    def require_multiple(self, whole: str, part: str) -> None:
        """Raise unless the size named `whole` is a multiple of the size named `part`."""
        if getattr(self, whole) % getattr(self, part):
            raise OptionsError(
                f"{whole}={getattr(self, whole)} is not a multiple of {part}={getattr(self, part)}",
                fix=f"change {whole} or {part}",
            )


S = TypeVar("S", bound=Sizes)


@dataclass(frozen=True)
class Family(Generic[S]):
    """One kind of model, of any size.

    Attributes:
        description: One line for a list of models.
        sizes: The dataclass of this family's options, with its defaults.
        module: Builds the module, in eval mode, with weights that depend on the sizes alone.
        inputs: Draws inputs from the sizes and a seed.
        axes: For each argument with dynamic axes, a map from axis to size name.
        limits: The greatest value of each size named in `axes`.
    """

    description: str
    sizes: type[S]
    module: Callable[[S], nn.Module]
    inputs: Callable[[S, int], Example]
    axes: Mapping[str, Mapping[int, str]]
    limits: Callable[[S], Mapping[str, int]]

    def build(self, name: str, given: Mapping[str, object]) -> ZooModel:
        """Return the model with the given sizes, and this family's defaults for the rest."""
        sizes = parse_sizes(name, self.sizes, given)
        with quiet_imports():
            module = self.module(sizes)
        args, kwargs = self.inputs(sizes, sizes.seed)
        return ZooModel(name, self, sizes, module, args, kwargs)


@dataclass(frozen=True)
class ZooModel:
    """A model of the zoo with example inputs.

    Attributes:
        name: Its name in the zoo.
        family: The family that it was built from.
        sizes: The sizes that it was built with.
        module: The float module, in eval mode.
        args: Positional example inputs.
        kwargs: Keyword example inputs.
    """

    name: str
    family: Family[Any]
    sizes: Sizes
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def description(self) -> str:
        """A one-line description of the model."""
        return self.family.description

    @property
    def dynamic_shapes(self) -> dict[str, dict[int, Any]] | None:
        """The `dynamic_shapes` for `torch.export`, or None if no axis is dynamic.

        Each axis goes from 1 to the family's limit. An axis that has size 1 in the example is left
        static: torch specializes such an axis to 1 and rejects it when it is declared dynamic.
        """
        limits = self.family.limits(self.sizes)
        dims = {
            size: Dim(size, min=1, max=limits[size])
            for axes in self.family.axes.values()
            for size in axes.values()
            if getattr(self.sizes, size) > 1
        }
        if not dims:
            return None
        return {
            argument: {axis: dims[size] for axis, size in axes.items() if size in dims}
            for argument, axes in self.family.axes.items()
        }

    def inputs(self, seed: int, **sizes: int) -> Example:
        """Draw fresh inputs.

        Args:
            seed: Seed of the draw; equal seeds give equal inputs.
            **sizes: Other sizes of the dynamic axes, such as ``batch=3``.

        Raises:
            OptionsError: A size does not belong to a dynamic axis, or is outside its range.
        """
        limits = self.family.limits(self.sizes)
        varying = {size for axes in self.family.axes.values() for size in axes.values()}
        for name, value in sizes.items():
            if name not in varying:
                raise OptionsError(
                    f"inputs of {self.name} have no varying size {name!r}",
                    fix=f"it has {', '.join(sorted(varying)) or 'none'}",
                )
            if not 1 <= value <= limits[name]:
                raise OptionsError(
                    f"{name}={value} is outside the range of {self.name}",
                    fix=f"give {name} a value from 1 to {limits[name]}",
                )
        changes: dict[str, Any] = dict(sizes)
        return self.family.inputs(replace(self.sizes, **changes), seed)


def parse_sizes(name: str, kind: type[S], given: Mapping[str, object]) -> S:
    """Return `kind` with the given values, which may be text as it stands on a command line.

    Raises:
        OptionsError: There is no such size, or its value has the wrong form.
    """
    defaults = {field.name: field.default for field in fields(kind)}
    values: dict[str, Any] = {}
    for size, value in given.items():
        if size not in defaults:
            raise OptionsError(
                f"{name} has no size {size!r}",
                fix=f"its sizes are {', '.join(defaults)}",
            )
        values[size] = _parse(f"{name}: {size}", value, defaults[size])
    return kind(**values)


def _parse(where: str, value: object, default: object) -> object:
    """Return `value` as a value of the default's type."""
    # By exact type: `True` is no number of layers.
    if type(value) is type(default):
        return value
    try:
        parsed = _from_text(str(value), default)
    except ValueError:
        parsed = None
    if type(parsed) is not type(default):
        raise OptionsError(
            f"{value!r} is not a value of type {type(default).__name__}",
            where=where,
            fix=f"write it as in {_as_text(default)}",
        )
    return parsed


def _from_text(text: str, default: object) -> object:
    match default:
        case torch.dtype():
            return getattr(torch, text.removeprefix("torch."), None)
        case tuple():
            return tuple(int(item) for item in text.strip("()[] ,").split(","))
        case float():
            return float(text)
        case int():
            return int(text)
        case _:
            return None


def _as_text(default: object) -> str:
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return str(default).removeprefix("torch.")
