"""Resolve a model: a name of the zoo, `module:factory`, `file.py:factory`, or a `.pt2` file."""

from __future__ import annotations

import ast
import inspect
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from qfuse import zoo
from qfuse.ir.errors import OptionsError
from qfuse.ir.words import a_kind
from qfuse.zoo import _torchao_api as ao
from qfuse.zoo.user_code import UserCode, imported

_FACTORY = "module:factory or file.py:factory"
_FORMS = "a name of the zoo, module:factory, file.py:factory, or the path of a .pt2 file"
_RETURNS = "return model, (model, args), (model, args, kwargs), or these and dynamic_shapes"


@dataclass(frozen=True)
class Loaded:
    """A model and its example inputs.

    Attributes:
        spec: The user's text.
        model: A module, or the exported program of a `.pt2` file.
        args: Positional example inputs; empty if the source has none.
        kwargs: Keyword example inputs.
        dynamic_shapes: The dynamic shapes for `torch.export`, if the source declares them.
        zoo: The zoo model, if it is one, which can generate more inputs.
    """

    spec: str
    model: nn.Module | ExportedProgram
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    dynamic_shapes: Any = None
    zoo: zoo.ZooModel | None = None


def load_model(spec: str, sizes: Mapping[str, object] | None = None) -> Loaded:
    """Return the model that `spec` names.

    Args:
        spec: A name of the zoo (`llama`), `module:factory`, `file.py:factory`, or the path of a
            `.pt2` file.
        sizes: Sizes of a zoo model, or keyword arguments of the factory.

    Raises:
        OptionsError: There is no such model, or it cannot be used with these sizes.
    """
    sizes = dict(sizes or {})
    if spec.endswith(".pt2"):
        return _load_file(spec, sizes)
    if ":" in spec:
        return _call_factory(spec, sizes)
    if spec in zoo.names():
        model = zoo.build(spec, **sizes)
        return Loaded(spec, model.module, model.args, model.kwargs, model.dynamic_shapes, model)
    if spec.endswith(".py"):
        raise OptionsError(
            f"{spec!r} does not say which function of the file makes the model",
            fix=f"write {spec}:function, which will {_RETURNS}",
        )
    what = "a folder, not a model" if Path(spec).is_dir() else "not a model"
    raise OptionsError(
        f"{spec!r} is {what}",
        fix=f"give {_FORMS}; the zoo has {', '.join(zoo.names())}",
    )


def _load_file(spec: str, sizes: Mapping[str, object]) -> Loaded:
    path = Path(spec)
    if not path.is_file():
        raise OptionsError(
            "this is a folder" if path.is_dir() else "there is no such file",
            where=str(path.absolute()),
            fix="check the path",
        )
    if sizes:
        raise OptionsError(
            f"a .pt2 file has its sizes already, so {', '.join(sizes)} cannot be set",
            where=spec,
            fix="leave the sizes out",
        )
    program = _read_program(path)
    if program.example_inputs is None:
        raise OptionsError(
            "this program was saved without example inputs, on which values are checked",
            where=spec,
            fix="export it again: torch.export.export(model, args) keeps them, and "
            "torch.export.save writes them",
        )
    args, kwargs = program.example_inputs
    return Loaded(spec, program, tuple(args), dict(kwargs))


def _read_program(path: Path) -> ExportedProgram:
    fix = "write it with torch.export.save"
    if not zipfile.is_zipfile(path):
        raise OptionsError("this is not a .pt2 file, or it is cut off", where=str(path), fix=fix)
    try:
        # A quantized program may call torchao's operators, which exist once torchao is imported.
        with ao.loaded():
            return torch.export.load(str(path))
    except (RuntimeError, KeyError, ValueError) as error:
        raise OptionsError(
            "this file does not hold an exported program that this torch can read",
            where=str(path),
            fix=f"{fix}, with torch {torch.__version__}",
        ) from error


def _call_factory(spec: str, sizes: Mapping[str, object]) -> Loaded:
    module, _, name = spec.rpartition(":")
    if not module or not name:
        raise OptionsError(f"{spec!r} is incomplete", fix=f"write {_FACTORY}")
    with imported(module, name, _RETURNS) as found:
        factory = _checked_factory(found, spec, sizes)
        failed = "the factory failed"
        with UserCode(failed, "check that it returns the model when it is called from Python"):
            made = factory(**{name: _number(value) for name, value in sizes.items()})
    return _unpack(spec, made)


def _checked_factory(
    found: object, spec: str, sizes: Mapping[str, object]
) -> Callable[..., object]:
    # A module is callable too, but calling it is a forward pass.
    if not callable(found) or isinstance(found, nn.Module):
        raise OptionsError(
            f"{spec.rpartition(':')[2]} is {a_kind(found)}, not a function that makes a model",
            where=spec,
            fix=f"define a function that will {_RETURNS}",
        )
    try:
        signature = inspect.signature(found)
    except ValueError:
        # A function in C without one: the call says what is wrong.
        return found
    try:
        # Before the call, so that a TypeError inside
        # the factory is not taken for wrong arguments.
        signature.bind(**sizes)
    except TypeError as error:
        given = f"with {dict(sizes)}" if sizes else "without arguments"
        raise OptionsError(
            f"the factory cannot be called {given}: {error}",
            where=spec,
            fix="give the sizes that it takes with --size NAME=VALUE, and defaults for the others",
        ) from error
    return found


def _number(value: object) -> object:
    """Read a size as Python would: a number or a truth value if it is one, else the text."""
    if not isinstance(value, str):
        return value
    try:
        read: object = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value
    return read if isinstance(read, (bool, int, float)) else value


def _unpack(spec: str, made: object) -> Loaded:
    """Return the factory's result, which has one of four forms."""
    if isinstance(made, nn.Module):
        return Loaded(spec, made)
    match made:
        case (nn.Module() as model, tuple() | list() as args):
            return Loaded(spec, model, tuple(args), {})
        case (nn.Module() as model, tuple() | list() as args, dict() as kwargs):
            return Loaded(spec, model, tuple(args), kwargs)
        case (nn.Module() as model, tuple() | list() as args, dict() as kwargs, shapes) if (
            isinstance(shapes, (dict, tuple, list))
        ):
            return Loaded(spec, model, tuple(args), kwargs, shapes)
        case (nn.Module(), torch.Tensor(), *_):
            fix = "return (model, (x,)): the inputs are a tuple, even if there is one"
        case _:
            fix = _RETURNS
    shape = type(made).__name__
    if isinstance(made, tuple):
        shape = f"({', '.join(type(item).__name__ for item in made)})"
    raise OptionsError(f"the factory returned {shape}", where=spec, fix=fix)
