"""Fake tensors for hand-built graphs: this package's only file with private torch API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
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


class _QuickMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Infers pointwise ops on contiguous tensors at once.

    With symbolic sizes torch runs their decomposition, in which a clamp is a dozen ops.
    """

    def _dispatch_impl(
        self, func: OpOverload, types: Sequence[type], args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        like = self._like(func, args, kwargs)
        if like is None:
            return super()._dispatch_impl(func, types, args, kwargs)
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


def new_fake_mode() -> FakeTensorMode:
    """Return a new ``FakeTensorMode`` with symbolic sizes enabled."""
    mode = _QuickMode(shape_env=ShapeEnv(), allow_non_fake_inputs=False)
    # A small graph never repeats an op on the same symbols: filling the cache is a third of the
    # time that its tests take.
    mode.cache_enabled = False
    return mode


def fake_constant(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """Return the fake tensor of a constant; all its sizes are fixed."""
    kind: type = type(tensor)
    if kind is not torch.Tensor or tensor.layout is not torch.strided:
        return mode.from_tensor(tensor, static_shapes=True)
    if tensor.requires_grad or tensor._is_view() or tensor.is_conj() or tensor.is_neg():
        return mode.from_tensor(tensor, static_shapes=True)
    shape, stride = tensor.shape, tensor.stride()
    value = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, value, tensor.device)


@contextmanager
def tracing(mode: FakeTensorMode) -> Iterator[None]:
    """Run a block in which ops compute fake tensors as in a capture.

    Some ops have a decomposition in Python for symbolic sizes; the one in C++ takes the sizes of
    the trace for fixed ones.
    """
    with enable_python_dispatcher(), mode:
        yield


def declare_range(size: torch.SymInt, low: int, high: int) -> None:
    """Set the range of a symbolic size; by default torch assumes two or more."""
    size.node.shape_env.var_to_range[size.node.expr] = ValueRanges(low, high)
