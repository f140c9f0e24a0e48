"""The ATen calls of one expansion, and the ones that earlier compiles in the process traced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate, map_arg

from qfuse.rewrite._fake_api import keep_sizes
from qfuse.rewrite.prelude import Node, Rewriter

# A template takes some kilobytes: ATen calls without values, and their literals.
_KEPT = 512


@dataclass(frozen=True, slots=True)
class Template:
    """A traced expansion: a list of steps whose arguments refer to earlier values.

    Attributes:
        steps: Calls, and tensors that the reference makes from numbers, in order. Their results
            are numbered behind the inputs.
        result: The number of the result, or a nest of such numbers.
    """

    steps: tuple[_Call | _Literal, ...]
    result: Any

    def insert(self, tensors: Sequence[Node], rw: Rewriter) -> Any:
        """Add the steps on ``tensors`` and return the result node or nodes."""
        known = list(tensors)
        for step in self.steps:
            known.append(step.insert(known, rw))
        return _filled(self.result, known)


def template_of(
    run: Callable[..., object], values: Sequence[torch.Tensor], key: Hashable
) -> Template:
    """Return the calls that ``run`` makes on tensors like ``values``.

    Expansions of tensors with fixed sizes are kept for later compiles. One with symbolic sizes is
    traced anew, since its sizes belong to one compile.

    Args:
        run: Computes the result.
        values: Fake tensors of one compile. An object that is passed twice stands for two tensors:
            nodes that one template made at two places have the same ones.
        key: Differs for functions that make other calls on the same tensors.
    """
    mode = _common_mode(values)
    types = [_type_of(value) for value in values]
    if mode is None or None in types:
        return _trace(run, values)
    kept = _kept((key, tuple(types), _ambient(values)))
    if kept:
        return _with_values(kept[0], mode)
    made = _trace(run, values)
    bare = _without_values(made)
    if bare is not None:
        kept.append(bare)
    return made


@dataclass(frozen=True, slots=True)
class _Call:
    target: Any
    args: Any
    kwargs: Any
    value: Any

    def insert(self, known: Sequence[Node], rw: Rewriter) -> Node:
        """Add the call."""
        args, kwargs = _filled((self.args, self.kwargs), known)
        return rw.replay(self.target, args, kwargs, self.value)

    def without_value(self) -> _Call | None:
        """Return the call with types for values, ``None`` without fixed sizes."""
        types = [_type_of(leaf) for leaf in _leaves(self.value)]
        if None in types:
            return None
        return replace(self, value=map_aggregate(self.value, cast("Any", _type_of)))

    def with_value(self) -> _Call:
        """Return the call with new tensors for types."""
        return replace(self, value=map_aggregate(self.value, cast("Any", _Type.make)))


@dataclass(frozen=True, slots=True)
class _Literal:
    tensor: torch.Tensor

    def insert(self, _known: Sequence[Node], rw: Rewriter) -> Node:
        """Add the tensor as a constant."""
        return rw.constant(self.tensor, "literal")

    def without_value(self) -> _Literal | None:
        """Return the literal, ``None`` for one that has no values."""
        return self.copy() if type(self.tensor) is torch.Tensor else None

    def copy(self) -> _Literal:
        """Return a literal with the same values."""
        return _Literal(self.tensor.clone())


@dataclass(frozen=True, slots=True)
class _Ref:
    number: int


@dataclass(frozen=True, slots=True)
class _Type:
    """What a fake tensor with fixed sizes is, apart from the compile it belongs to."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def make(self) -> torch.Tensor:
        """Make a tensor of this type."""
        shape, strides = self.shape, self.strides
        if not self.offset:
            return torch.empty_strided(shape, strides, dtype=self.dtype, device=self.device)
        pairs = zip(shape, strides, strict=True)
        extent = self.offset + 1 + sum((size - 1) * step for size, step in pairs if size)
        whole = torch.empty(extent, dtype=self.dtype, device=self.device)
        return whole.as_strided(shape, strides, self.offset)


# Safe to cache: the key has all that a trace of fixed sizes depends on. The list is filled once.
@functools.lru_cache(maxsize=_KEPT)
def _kept(_key: Hashable) -> list[Template]:
    return []


def _ambient(values: Sequence[torch.Tensor]) -> Hashable:
    """Return the settings of the process on which a trace may depend."""
    devices = {value.device.type: None for value in values}
    casts = [(d, torch.get_autocast_dtype(d)) for d in devices if torch.is_autocast_enabled(d)]
    return torch.get_default_dtype(), str(torch.get_default_device()), tuple(casts)


def _trace(run: Callable[..., object], values: Sequence[torch.Tensor]) -> Template:
    # Pre-dispatch tracing keeps a linear a linear: the same call returns the same bits, and its
    # decomposition squeezes a temporary in place for inputs of one axis.
    with torch.no_grad(), keep_sizes(_common_mode(values)):
        # The trace knows tensors by identity.
        distinct = [value.detach() for value in values]
        traced: GraphModule = make_fx(run, pre_dispatch=True)(*distinct)
    numbers: dict[Node, Any] = {}
    steps: list[_Call | _Literal] = []
    for node in traced.graph.nodes:
        if node.op in {"get_attr", "call_function"}:
            steps.append(_step(node, traced, numbers))
        elif node.op == "output":
            return Template(tuple(steps), map_arg(node.args[0], numbers.__getitem__))
        numbers[node] = _Ref(len(numbers))
    raise AssertionError("a graph ends with its output")


def _step(node: Node, traced: GraphModule, numbers: Mapping[Node, Any]) -> _Call | _Literal:
    if node.op == "get_attr":
        return _Literal(getattr(traced, str(node.target)))
    args, kwargs = map_arg((node.args, node.kwargs), numbers.__getitem__)
    return _Call(node.target, args, kwargs, node.meta["val"])


def _without_values(template: Template) -> Template | None:
    """Return the template for any compile, ``None`` if it belongs to one."""
    steps: list[_Call | _Literal] = []
    for step in template.steps:
        plain = step.without_value()
        if plain is None:
            return None
        steps.append(plain)
    return replace(template, steps=tuple(steps))


def _with_values(template: Template, mode: Any) -> Template:
    """Return the template with new fake tensors of ``mode``, and literals of its own."""
    # A compiled model owns its constants: one that is written must not change another model.
    own = [step.copy() if isinstance(step, _Literal) else step for step in template.steps]
    with mode, torch.no_grad():
        steps = [step.with_value() if isinstance(step, _Call) else step for step in own]
    return replace(template, steps=tuple(steps))


def _filled(arg: Any, known: Sequence[Node]) -> Any:
    def node(leaf: Any) -> Any:
        return known[leaf.number] if isinstance(leaf, _Ref) else leaf

    return map_aggregate(arg, node)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value]


def _common_mode(values: Sequence[torch.Tensor]) -> Any:
    """Return the fake mode of all ``values``, or ``None``."""
    modes = {id(mode): mode for mode in (getattr(v, "fake_mode", None) for v in values)}
    return next(iter(modes.values())) if len(modes) == 1 else None


def _type_of(value: Any) -> _Type | None:
    """Return the type of a fake tensor with fixed sizes, ``None`` for other values."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    if value.requires_grad or value.is_conj() or value.is_neg():
        return None
    shape, strides, offset = tuple(value.shape), tuple(value.stride()), value.storage_offset()
    # A symbolic size belongs to the compile that made it.
    numbers: tuple[object, ...] = (*shape, *strides, offset)
    if any(isinstance(number, torch.SymInt) for number in numbers):
        return None
    return _Type(value.dtype, value.device, shape, strides, int(offset))
