"""Fake tensors for hand-built graphs: this package's only file with private torch API."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.value_ranges import ValueRanges

aten = torch.ops.aten
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
# Pointwise ops whose result has the dtype of operands that have all the same one.
_OF_FLOATS = {
    *(aten.abs.default, aten.neg.default, aten.reciprocal.default, aten.relu.default),
    *(aten.round.default, aten.rsqrt.default, aten.sigmoid.default, aten.silu.default),
    *(aten.sqrt.default, aten.div.Tensor),
}
_OF_NUMBERS = {
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor),
    *(aten.maximum.default, aten.minimum.default, aten.clamp.default),
}
_IN_PYTHON = torch._C.DispatchKey.PythonDispatcher
# Arguments of which a result can depend on nothing but the value.
_PLAIN = {
    *(int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format),
}
# Calls on tensors of fixed sizes whose result is kept; each takes about a kilobyte.
_MOST_CALLS = 20_000


class _NotKeptError(Exception):
    """The result of a call belongs to one graph."""


@dataclass(frozen=True, slots=True)
class _Made:
    """A result of fixed sizes, and the number of the operand whose memory it has."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    source: int | None

    @property
    def extent(self) -> int:
        """The least number of elements of its memory."""
        pairs = zip(self.shape, self.stride, strict=True)
        return self.offset + 1 + sum((size - 1) * step for size, step in pairs if size)


# Safe to cache: the key has all that a result of fixed sizes depends on. The list is filled once.
@functools.lru_cache(maxsize=_MOST_CALLS)
def _kept(_key: Hashable) -> list[Any]:
    return []


class _QuickMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Infers pointwise ops on contiguous tensors at once, and calls that it saw before.

    With symbolic sizes torch runs their decomposition, in which a clamp is a dozen ops.
    """

    def call(self, op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Infer a call as in a capture.

        Some ops have a decomposition in Python for symbolic sizes; the one in C++ takes the sizes
        of the trace for fixed ones.
        """

        def inferred() -> Any:
            with enable_python_dispatcher(), self:
                return op(*args, **kwargs)

        return self._remembered(("captured", op), args, kwargs, inferred)

    def from_tensor(self, tensor: torch.Tensor, **how: Any) -> Any:
        """Return the fake tensor of a tensor; a plain one of fixed sizes is not asked about."""
        plain = how == {"static_shapes": True} and _is_plain(tensor)
        return _fake_of(self, tensor) if plain else super().from_tensor(tensor, **how)

    def _dispatch_impl(
        self, func: OpOverload, types: Sequence[type], args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        like = self._like(func, args, kwargs)
        if like is None:
            ask = super()._dispatch_impl
            in_python = torch._C._dispatch_tls_is_dispatch_key_included(_IN_PYTHON)
            return self._remembered(
                (in_python, func), args, kwargs, lambda: ask(func, types, args, kwargs)
            )
        operand, dtype = like
        value = torch.empty_strided(operand.shape, operand.stride(), dtype=dtype, device="meta")
        return FakeTensor(self, value, operand.device)

    def _like(
        self, func: OpOverload, args: Any, kwargs: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.dtype] | None:
        """Return the operand that the result is like, and its dtype; ``None`` to ask torch."""
        if func is aten._to_copy.default:
            known = set(kwargs) == {"dtype"} and self._is_plain(args[0])
            return (args[0], kwargs["dtype"]) if known else None
        if kwargs or (func not in _OF_FLOATS and func not in _OF_NUMBERS):
            return None
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if not tensors or not all(map(self._is_plain, tensors)) or not _one_type(func, args):
            return None
        whole = max(tensors, key=lambda t: t.dim())
        candidates = (t for t in tensors if t.dim() == whole.dim())
        like = (t for t in candidates if all(_broadcasts(other, t) for other in tensors))
        return next(((t, t.dtype) for t in like), None)

    def _remembered(self, key: Hashable, args: Any, kwargs: Any, infer: Callable[[], Any]) -> Any:
        """Return the result of a call: of the types that an equal call had, or inferred."""
        tensors: list[torch.Tensor] = []
        told = None
        # Autocast changes what a linear returns.
        if not torch._C._is_any_autocast_enabled():
            with suppress(_NotKeptError):
                told = self._key((args, tuple(kwargs.items())), tensors)
        if told is None:
            return infer()
        kept = _kept((key, told, torch.get_default_dtype()))
        if kept:
            return self._again(kept[0], tensors)
        result = infer()
        with suppress(_NotKeptError):
            kept.append(self._types(result, tensors))
        return result

    def _key(self, value: Any, tensors: list[torch.Tensor]) -> Hashable:
        """Return what a result can depend on; tensors are collected in order."""
        if isinstance(value, (tuple, list)):
            return tuple(self._key(part, tensors) for part in value)
        if isinstance(value, torch.Tensor):
            kind, memory = self._type(value), _memory(value)
            tensors.append(value)
            return kind, next(i for i, t in enumerate(tensors) if _memory(t) == memory)
        if value is None or type(value) in _PLAIN:
            # 1, 1.0 and True are equal, and make other results.
            return type(value), value
        raise _NotKeptError

    def _type(self, value: torch.Tensor) -> tuple[Any, ...]:
        if type(value) is not FakeTensor or not self.is_our_fake(value):
            raise _NotKeptError
        odd = value.constant is not None or value.layout is not torch.strided
        if odd or value.requires_grad or value._has_symbolic_sizes_strides:
            raise _NotKeptError
        if value.is_conj() or value.is_neg():
            raise _NotKeptError
        place = tuple(value.shape), value.stride(), value.storage_offset()
        return value.dtype, value.device, *place

    def _types(self, result: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the types of a result, each with the number of the operand whose memory it has."""
        if isinstance(result, (tuple, list)):
            return type(result), [self._types(part, tensors) for part in result]
        if not isinstance(result, torch.Tensor) or any(result is t for t in tensors):
            raise _NotKeptError
        dtype, device, *place = self._type(result)
        memory = _memory(result)
        source = next((i for i, t in enumerate(tensors) if _memory(t) == memory), None)
        if source is not None and tensors[source].dtype != dtype:
            raise _NotKeptError
        shape, stride, offset = place
        return _Made(dtype, device, shape, stride, offset, source)

    def _again(self, made: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """Return a new result of the types of an earlier one."""
        if not isinstance(made, _Made):
            kind, kept = made
            parts = [self._again(part, tensors) for part in kept]
            # A decomposition may return a named tuple.
            return kind(*parts) if hasattr(kind, "_make") else kind(parts)
        if made.source is not None:
            with in_kernel_invocation_manager(self):
                value = tensors[made.source].as_strided(made.shape, made.stride, made.offset)
        elif made.offset:
            whole = torch.empty(made.extent, dtype=made.dtype, device="meta")
            value = whole.as_strided(made.shape, made.stride, made.offset)
        else:
            value = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
        return FakeTensor(self, value, made.device)

    def _is_plain(self, value: object) -> bool:
        """Whether a value is a contiguous fake tensor of this mode, whose values are unknown."""
        if type(value) is not FakeTensor or not self.is_our_fake(value):
            return False
        plain = value.constant is None and value.layout is torch.strided
        return plain and _is_contiguous(value)


def _one_type(func: OpOverload, args: Sequence[Any]) -> bool:
    """Whether the result has the dtype and device of all operands."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    numbers = {type(arg) for arg in args if arg is not None and not isinstance(arg, torch.Tensor)}
    if func is aten.clamp.default and not numbers:
        # It is refused.
        return False
    if len({(t.dtype, t.device) for t in tensors}) != 1:
        return False
    if tensors[0].dtype in _FLOATS:
        return numbers <= {int, float}
    return func in _OF_NUMBERS and tensors[0].dtype in _INTEGERS and numbers <= {int}


def _memory(value: torch.Tensor) -> int:
    """Return what is equal for tensors that share memory."""
    address: int = value.untyped_storage()._cdata
    return address


def _expr(size: Any) -> Any:
    return size if isinstance(size, int) else size.node.expr


def _is_contiguous(value: torch.Tensor) -> bool:
    """Whether strides are those of a contiguous tensor, without a guard."""
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if _expr(stride) != expected:
            return False
        # Torch counts an empty axis as one.
        expected = expected * (_expr(size) or 1)
    return True


def _broadcasts(value: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether ``value`` broadcasts to the shape of ``whole``, without a guard."""
    pairs = zip(reversed(value.shape), reversed(whole.shape), strict=False)
    return all(_expr(size) in (1, _expr(full)) for size, full in pairs)


def new_fake_mode() -> _QuickMode:
    """Return a new ``FakeTensorMode`` with symbolic sizes enabled."""
    mode = _QuickMode(shape_env=ShapeEnv(), allow_non_fake_inputs=False)
    # A small graph never repeats an op on the same symbols: filling torch's cache is a third of
    # the time that its tests take.
    mode.cache_enabled = False
    return mode


def fake_constant(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """Return the fake tensor of a constant; all its sizes are fixed."""
    fake: torch.Tensor = mode.from_tensor(tensor, static_shapes=True)
    return fake


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether dtype, shape and strides are all that there is to a tensor."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    return not (tensor.requires_grad or tensor._is_view() or tensor.is_conj() or tensor.is_neg())


def _fake_of(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    shape, stride = tensor.shape, tensor.stride()
    value = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, value, tensor.device)


def declare_range(size: torch.SymInt, low: int, high: int) -> None:
    """Set the range of a symbolic size; by default torch assumes two or more."""
    size.node.shape_env.var_to_range[size.node.expr] = ValueRanges(low, high)
