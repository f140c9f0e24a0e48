"""Quantization recipes by name: `w8a8-dynamic`, `w4a16`, ..."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from qfuse.capture._export_api import trace_errors
from qfuse.capture.diagnose import capture_error
from qfuse.ir.errors import OptionsError, QfuseError
from qfuse.ir.quant.element import Element
from qfuse.zoo import _torchao_api as ao
from qfuse.zoo.family import Example
from qfuse.zoo.linears import LinearScheme, quantize_with
from qfuse.zoo.mx_formats import MxFormat, MxLinear, float8, mx, nvfp4, peak_scale
from qfuse.zoo.notes import Note, Outcome
from qfuse.zoo.pt2e import quantize_exported, under_autocast

WHOLE_CHANNEL = -1
"""Group size for one scale per output feature."""

_INT4 = 4
_GROUP = 32


@dataclass(frozen=True)
class Quantized:
    """A quantized model.

    Attributes:
        model: The quantized copy of the model, in eval mode.
        recipe: The recipe's name.
        layers: How many layers were quantized.
        notes: What was not quantized, and why.
    """

    model: nn.Module
    recipe: str
    layers: int
    notes: tuple[Note, ...]


@dataclass(frozen=True)
class _Task:
    """The arguments of one call of `quantize`."""

    model: nn.Module
    example: Example
    dynamic_shapes: Any
    calibration: Sequence[Example]
    group_size: int | None


@dataclass(frozen=True)
class _Recipe:
    description: str
    run: Callable[[_Task], Outcome]
    grouped: bool = False


def _linears(scheme: Callable[[int | None], LinearScheme]) -> Callable[[_Task], Outcome]:
    def run(task: _Task) -> Outcome:
        return quantize_with(scheme(task.group_size), task.model, task.calibration)

    return run


def _exported(*, dynamic: bool = False, bf16: bool = False) -> Callable[[_Task], Outcome]:
    def run(task: _Task) -> Outcome:
        outcome = quantize_exported(
            task.model, task.example, task.dynamic_shapes, task.calibration, dynamic=dynamic
        )
        return replace(outcome, model=under_autocast(outcome.model)) if bf16 else outcome

    return run


def _int8(_: int | None, **options: bool) -> LinearScheme:
    return LinearScheme(partial(ao.int8_dynamic, **options))


def _int8_static(_: int | None) -> LinearScheme:
    return LinearScheme(ao.int8_static, static=True)


def _int8_weights(group_size: int | None) -> LinearScheme:
    size = _size(group_size, None)
    return LinearScheme(partial(ao.int8_weights, size), size)


def _int_weights(group_size: int | None, *, bits: int, asymmetric: bool = False) -> LinearScheme:
    size = _size(group_size, _GROUP if bits == _INT4 else None)
    return LinearScheme(partial(ao.int_weights, bits, size, asymmetric=asymmetric), size)


def _int_weights_int8(
    group_size: int | None, *, bits: int, asymmetric: bool = False
) -> LinearScheme:
    size = _size(group_size, _GROUP)
    config = partial(ao.int8_dynamic_int_weights, bits, size, asymmetric=asymmetric)
    return LinearScheme(config, size)


def _packed_int4_weights(group_size: int | None) -> LinearScheme:
    size = _size(group_size, _GROUP)
    if size is None:
        raise OptionsError("packed weights are in groups", fix="give 32, 64 or 128")
    return LinearScheme(partial(ao.packed_int4_weights, size), size, rows=16)


def _size(given: int | None, default: int | None) -> int | None:
    """Return the number of weights per scale, or ``None`` for a whole channel."""
    if given is None:
        return default
    return None if given == WHOLE_CHANNEL else given


def _micro(
    make: Callable[[], MxFormat], *, static: bool = False, weights_only: bool = False
) -> Callable[[int | None], LinearScheme]:
    def scheme(_: int | None) -> LinearScheme:
        form = make()

        def swap(linear: nn.Linear, outer: torch.Tensor | None) -> nn.Module:
            scale = None if outer is None else outer.reshape(1, 1)
            return MxLinear(linear, form, scale, weights_only=weights_only)

        return LinearScheme(group_size=form.block, static=static, swap=swap, scale_of=peak_scale)

    return scheme


def _float8(_: int | None) -> LinearScheme:
    return LinearScheme(ao.float8_weights)


_RECIPES: Mapping[str, _Recipe] = MappingProxyType(
    {
        "w8a8-static": _Recipe(
            "PT2E, int8 weights, uint8 activations with calibrated scales", _exported()
        ),
        "w8a8-static-bf16": _Recipe(
            "the same, with the float rest under bfloat16 autocast", _exported(bf16=True)
        ),
        "w8a8-static-ao": _Recipe(
            "torchao, int8 weights, int8 activations with calibrated scales", _linears(_int8_static)
        ),
        "w8a8-dynamic": _Recipe(
            "torchao, int8 weights, int8 activations with a scale per token", _linears(_int8)
        ),
        "w8a8-dynamic-tensor": _Recipe(
            "torchao, int8 weights, int8 activations with one scale per tensor",
            _linears(partial(_int8, per_tensor=True)),
        ),
        "w8a8-dynamic-asym": _Recipe(
            "torchao, int8 weights, int8 activations with scale and zero point per token",
            _linears(partial(_int8, asymmetric=True)),
        ),
        "pt2e-dynamic": _Recipe(
            "PT2E, int8 weights, uint8 activations with one scale per tensor at run time",
            _exported(dynamic=True),
        ),
        "w8a8-group": _Recipe(
            "torchao, int8 weights in groups, int8 activations with scale and zero point per token",
            _linears(partial(_int_weights_int8, bits=8)),
            grouped=True,
        ),
        "w8a8-group-asym": _Recipe(
            "the same, with a zero point per group of weights",
            _linears(partial(_int_weights_int8, bits=8, asymmetric=True)),
            grouped=True,
        ),
        "w4a8": _Recipe(
            "torchao, int4 weights in groups, int8 activations with scale and zero point per token",
            _linears(partial(_int_weights_int8, bits=4)),
            grouped=True,
        ),
        "w4a8-asym": _Recipe(
            "the same, with a zero point per group of weights",
            _linears(partial(_int_weights_int8, bits=4, asymmetric=True)),
            grouped=True,
        ),
        "w8a16": _Recipe(
            "torchao, int8 weights per channel or in groups, float activations",
            _linears(_int8_weights),
            grouped=True,
        ),
        "w8a16-asym": _Recipe(
            "the same, with a zero point per channel or group",
            _linears(partial(_int_weights, bits=8, asymmetric=True)),
            grouped=True,
        ),
        "w4a16": _Recipe(
            "torchao, int4 weights in groups, float activations",
            _linears(partial(_int_weights, bits=4)),
            grouped=True,
        ),
        "w4a16-asym": _Recipe(
            "the same, with a zero point per group",
            _linears(partial(_int_weights, bits=4, asymmetric=True)),
            grouped=True,
        ),
        "w4a16-packed": _Recipe(
            "torchao, int4 weights in groups packed for aten's int4 product, float activations",
            _linears(_packed_int4_weights),
            grouped=True,
        ),
        "fp8": _Recipe("torchao, float8 weights per channel, float activations", _linears(_float8)),
        "fp8-dynamic": _Recipe(
            "float8 weights per channel, float8 activations with a scale per token",
            _linears(_micro(float8)),
        ),
        "fp8-dynamic-tensor": _Recipe(
            "float8 weights per channel, float8 activations with one scale per tensor",
            _linears(_micro(partial(float8, per_tensor=True))),
        ),
        "mxfp8": _Recipe(
            "MX, float8 e4m3 weights and activations in blocks of 32, scales chosen at run time",
            _linears(_micro(mx)),
        ),
        "mxfp6": _Recipe(
            "MX, float6 e2m3 weights and activations in blocks of 32, scales chosen at run time",
            _linears(_micro(partial(mx, Element.E2M3))),
        ),
        "mxfp4": _Recipe(
            "MX, float4 e2m1 weights and activations in blocks of 32, scales chosen at run time",
            _linears(_micro(partial(mx, Element.E2M1))),
        ),
        "mxfp4-a16": _Recipe(
            "MX, float4 e2m1 weights in blocks of 32, float activations",
            _linears(_micro(partial(mx, Element.E2M1), weights_only=True)),
        ),
        "nvfp4": _Recipe(
            "NVFP4, weights and activations in blocks of 16, scales of both levels at run time",
            _linears(_micro(nvfp4)),
        ),
        "nvfp4-static": _Recipe(
            "NVFP4, the same with calibrated second-level scales of activations",
            _linears(_micro(nvfp4, static=True)),
        ),
        "nvfp4-a16": _Recipe(
            "NVFP4, weights in blocks of 16, float activations",
            _linears(_micro(nvfp4, weights_only=True)),
        ),
    }
)


def names() -> tuple[str, ...]:
    """Return the valid names for `quantize`."""
    return tuple(_RECIPES)


def describe(name: str) -> str:
    """Return a one-line description of a recipe."""
    return _recipe(name).description


def quantize(  # noqa: PLR0913  (what torch.export takes, and what to do)
    model: nn.Module,
    recipe: str,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    calibration: Sequence[Example] | None = None,
    *,
    group_size: int | None = None,
) -> Quantized:
    """Quantize a copy of a model.

    Args:
        model: A float module. Neither it nor anything in it is changed.
        recipe: One of `names()`.
        args: Positional example inputs.
        kwargs: Keyword example inputs.
        dynamic_shapes: In the format of `torch.export`; only the PT2E recipes need it, and their
            result runs with those sizes only.
        calibration: Inputs that static scales are measured on; the example inputs by default.
        group_size: Weights per scale, in recipes with groups: 32 by default where weights have 4
            bits or activations are quantized, else a whole channel, which `WHOLE_CHANNEL` asks for.

    Raises:
        OptionsError: An argument has an invalid value.
        CaptureError: The model cannot be exported, or does not run on its inputs.
        QfuseError: Nothing in the model could be quantized.
    """
    chosen = _recipe(recipe)
    _check(model, recipe, chosen, group_size)
    example: Example = (args, dict(kwargs or {}))
    examples = [example] if calibration is None else list(calibration)
    if not examples:
        raise OptionsError("calibration holds no inputs", fix="give at least one, or None")
    task = _Task(model, example, dynamic_shapes, examples, group_size)
    try:
        outcome = chosen.run(task)
    except QfuseError:
        raise
    except trace_errors() as error:
        # The model was exported, or ran on what it is calibrated with.
        raise capture_error(error, f"quantizing with {recipe}") from error
    if not outcome.layers:
        reasons = "; ".join(map(str, outcome.notes)) or "the model has no linear layer"
        other = "choose another recipe"
        size = f"give a group size that divides in_features, such as {_GROUP}, or {other}"
        raise QfuseError(
            f"{recipe} found nothing to quantize",
            where=reasons,
            fix=other if _size(group_size, None) is None else size,
        )
    return Quantized(outcome.model, recipe, outcome.layers, outcome.notes)


def _recipe(name: str) -> _Recipe:
    if name not in _RECIPES:
        # `w8a8` begins several names, but by its letters it is closest to `w8a16`.
        longer = [known for known in _RECIPES if name and known.startswith(name)]
        near = longer or difflib.get_close_matches(name, _RECIPES, n=1)
        guess = f"did you mean {' or '.join(near)}? " if near else ""
        raise OptionsError(
            f"unknown recipe {name!r}", fix=f"{guess}there are {', '.join(_RECIPES)}"
        )
    return _RECIPES[name]


def _check(model: nn.Module, name: str, recipe: _Recipe, group_size: int | None) -> None:
    if not isinstance(model, nn.Module):
        raise OptionsError(
            f"only an nn.Module can be quantized, not {type(model).__name__}",
            fix="quantize the module, then export it",
        )
    if group_size is not None and not recipe.grouped:
        raise OptionsError(
            f"{name} has no groups, so group_size={group_size} has no effect",
            fix="leave group_size out",
        )
    if group_size is not None and group_size < 1 and group_size != WHOLE_CHANNEL:
        raise OptionsError(
            f"group_size={group_size} is too small",
            fix=f"give 32, 64 or 128, or {WHOLE_CHANNEL} for a whole channel",
        )
