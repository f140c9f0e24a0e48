"""The example call: the names of its arguments, and the values to trace."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch

from qfuse.capture._export_api import flatten, flatten_with_paths
from qfuse.capture.containers import register_caches, verify_cache
from qfuse.ir.errors import CaptureError
from qfuse.ir.graph.memory import address_of
from qfuse.ir.signature._tree_api import is_fake_tensor, is_subclass, unflatten
from qfuse.ir.sizes import axis_order
from qfuse.ir.words import a_kind

_CONSTANTS = (int, float, bool, str, type(None))


@dataclass(frozen=True, slots=True)
class Parameters:
    """The signature of ``forward``.

    Attributes:
        names: Parameters that take positional arguments.
        rest: Name of the ``*args`` parameter, if there is one.
        defaults: Default values that are plain constants.
    """

    names: tuple[str, ...] = ()
    rest: str | None = None
    defaults: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, forward: Callable[..., Any]) -> Parameters:
        """Read the signature of ``forward``."""
        by_position = (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
        parameters = inspect.signature(forward).parameters.values()
        return cls(
            tuple(p.name for p in parameters if p.kind in by_position),
            next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), None),
            {p.name: p.default for p in parameters if isinstance(p.default, _CONSTANTS)},
        )

    def spell(self, position: int) -> tuple[str, str]:
        """Return the name of the argument at ``position``, and its name in torch's guards."""
        if position < len(self.names):
            name = self.names[position]
            return name, f"L[{name!r}]"
        rest, index = self.rest or "args", position - len(self.names)
        return f"{rest}[{index}]", f"L[{rest!r}][{index}]"

    def name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Return the arguments of a call with their names."""
        return [*((self.spell(i)[0], value) for i, value in enumerate(args)), *kwargs.items()]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of the example call.

    Attributes:
        name: Its name in user code.
        source: Its name in torch's guards.
        value: The user's value; ``None`` also for a program without an example.
        dims: The ``dynamic_shapes`` entry per axis.
    """

    name: str
    source: str
    value: Any
    dims: dict[int, Any]


def read_call(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any], Parameters]:
    """Validate the example call and return the arguments to trace.

    Tensors are detached and dense, since later calls may have another layout. Those that share
    memory with an earlier one or with the model are copied: torch.export would merge a tensor that
    is passed twice, and where one is written, the graph would write the other.

    Raises:
        CaptureError: The arguments do not fit ``forward``, or cannot be inputs of a graph.
    """
    if not isinstance(args, (tuple, list)):
        raise CaptureError(
            f"args must be a tuple of the arguments of forward, got {type(args).__name__}",
            fix="pass args=(x,)",
        )
    if not isinstance(kwargs, (Mapping, type(None))):
        raise CaptureError(
            f"kwargs must be a mapping of arguments by name, got {type(kwargs).__name__}",
            fix='pass kwargs={"x": x}',
        )
    call = (tuple(args), dict(kwargs or {}))
    parameters = Parameters.of(model.forward)
    try:
        # torch.export reports the same mistake in terms of its own structures.
        inspect.signature(model.forward).bind(*call[0], **call[1])
    except TypeError as error:
        if not any(call):
            raise CaptureError(
                f"there are no example inputs, and {type(model).__name__}.forward needs them: "
                f"{error}",
                fix="give args=(x,); a factory for the command line returns (model, (x,))",
            ) from error
        raise CaptureError(
            f"the example does not fit {type(model).__name__}.forward: {error}",
            fix=f"forward takes {inspect.signature(model.forward)}",
        ) from error
    # torch flattens registered containers only, and the call is flattened below.
    register_caches()
    for name, value in parameters.name(*call):
        verify_cache(name, value)
    _check_leaves(leaves_of(call, parameters, None))
    leaves, spec = flatten(call)
    values = (*model.parameters(), *model.buffers())
    held = {address_of(v) for v in values if not (is_subclass(v) or is_fake_tensor(v))}
    new_args, new_kwargs = unflatten(_traceable(leaves, held), spec)
    return new_args, new_kwargs, parameters


def leaves_of(
    call: tuple[Sequence[Any], Mapping[str, Any]], parameters: Parameters, dynamic_shapes: Any
) -> list[Leaf]:
    """Return the leaves of a call in the order in which torch flattens it."""
    found = []
    for path, value in flatten_with_paths(call):
        (group, _), (key, _), *rest = path
        name, source = parameters.spell(key) if group == 0 else (key, f"L[{key!r}]")
        below = "".join(spelled for _, spelled in rest)
        top = [key] if isinstance(dynamic_shapes, Sequence) else [name.split("[")[0]]
        if group == 0 and key >= len(parameters.names) and parameters.rest is not None:
            top = [parameters.rest, key - len(parameters.names)]
        entry = _entry(dynamic_shapes, [*top, *(k for k, _ in rest)])
        dims = _dims(name + below, value, entry)
        found.append(Leaf(name + below, source + below, value, dims))
    return found


def _entry(shapes: Any, keys: list[Any]) -> Any:
    """Walk down a tree of dynamic shapes; torch.export reports mismatches."""
    for key in keys:
        match shapes:
            case Mapping() if key in shapes:
                shapes = shapes[key]
            case list() | tuple() if isinstance(key, int) and key < len(shapes):
                shapes = shapes[key]
            case _:
                return None
    return shapes


def _dims(name: str, value: Any, entry: Any) -> dict[int, Any]:
    """Return the entry of ``dynamic_shapes`` for an input by axis, counted from the first one.

    Raises:
        CaptureError: It has an axis that the input does not have.
    """
    # A program that was saved without its example has no values.
    rank = value.ndim if isinstance(value, torch.Tensor) else None
    match entry:
        case Mapping():
            for axis in entry:
                if rank is not None and not (isinstance(axis, int) and -rank <= axis < rank):
                    raise _no_axis(name, value, f"the axis {axis!r}")
            return {axis % rank if rank else axis: dim for axis, dim in entry.items()}
        case list() | tuple():
            if rank is not None and len(entry) != rank:
                raise _no_axis(name, value, f"a list of length {len(entry)}")
            return dict(enumerate(entry))
        case _:
            return {} if entry is None else {0: entry}


def _no_axis(name: str, value: torch.Tensor, given: str) -> CaptureError:
    rank = value.ndim
    axes = ", ".join(map(str, range(rank)))
    return CaptureError(
        f"dynamic_shapes has {given} for {name}, which has rank {rank}: its shape is "
        f"{list(value.shape)}",
        fix=f"name axes of {name} by number ({axes}), or give a list with one entry for each"
        if rank
        else f"leave {name} out: it has no axes, so nothing of it can vary; None stands for that",
    )


def is_dynamic(dim: Any) -> bool:
    """Return whether an entry of ``dynamic_shapes`` requests a dynamic size."""
    kind = getattr(getattr(dim, "type", None), "name", "")
    return dim is not None and not isinstance(dim, int) and kind != "STATIC"


def _check_leaves(leaves: list[Leaf]) -> None:
    for leaf in leaves:
        value = leaf.value
        if isinstance(value, torch.Tensor):
            if is_fake_tensor(value):
                raise fake_error(leaf.name)
            if is_subclass(value) or value.layout is not torch.strided:
                raise CaptureError(
                    f"{leaf.name} is {a_kind(value)} of layout {value.layout}: "
                    "inputs are plain tensors",
                    fix="pass a dense plain tensor; quantized tensors belong in the model",
                )
        elif not isinstance(value, _CONSTANTS):
            raise CaptureError(
                f"{leaf.name} is {a_kind(value)}: inputs are tensors, numbers, strings, "
                "None, and containers of these that torch knows",
                fix="pass tensors; register a container of your own with "
                "torch.export.register_dataclass",
            )


def fake_error(name: str) -> CaptureError:
    """Return the error for a fake tensor, of which only the type is known."""
    return CaptureError(
        f"{name} is a FakeTensor: it has a shape and no values, which the check of values needs",
        fix="load the model and make the example outside of FakeTensorMode",
    )


def _traceable(leaves: Sequence[Any], held: AbstractSet[int]) -> list[Any]:
    traced = []
    addresses = set(held)
    for leaf in leaves:
        value = leaf
        if isinstance(leaf, torch.Tensor):
            value = leaf.detach()
            address = address_of(value)
            # A view with gaps would fix its strides in the graph, and later calls have others.
            gaps = axis_order(value.shape, value.stride()) is None or value.storage_offset()
            if gaps or (address and address in addresses):
                value = value.clone(memory_format=torch.preserve_format)
            addresses.add(address)
        traced.append(value)
    return traced
