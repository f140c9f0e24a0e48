"""Input guards: a cheap check of every input before every run, and its error messages.

A compiled graph relies on the properties that its capture saw. With other inputs, some backends
reinterpret the bytes of another dtype or read out of bounds, so every input is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qfuse.ir.errors import InputError
from qfuse.ir.graph.memory import span_of
from qfuse.ir.graph.stage_graph import InputSpec, Signature, SymbolRange
from qfuse.ir.signature._tree_api import is_fake_tensor, is_subclass
from qfuse.ir.signature.bind import same_constant
from qfuse.ir.signature.size_expr import SizeFunction, parse_size
from qfuse.ir.sizes import inverse

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


@dataclass(frozen=True, slots=True)
class _TensorGuard:
    """The compared properties of one tensor, stored for fast access."""

    index: int
    spec: InputSpec
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int | str, ...]
    symbolic: bool


class Guards:
    """Checks the leaves of a call; created once per signature."""

    def __init__(self, signature: Signature) -> None:
        self._symbols = signature.symbols
        self._tensors = tuple(
            _TensorGuard(
                index,
                spec,
                spec.dtype,
                spec.device,
                spec.shape,
                any(isinstance(size, str) for size in spec.shape),
            )
            for index, spec in enumerate(signature.inputs)
            if spec.dtype is not None and spec.device is not None
        )
        self._constants = tuple(
            (index, spec) for index, spec in enumerate(signature.inputs) if spec.dtype is None
        )
        self._relations: tuple[tuple[str, SizeFunction], ...] = tuple(
            (text, parse_size(text)) for text in signature.relations
        )
        self._written = frozenset(
            m.input_index for m in signature.mutations if m.input_index is not None
        )
        # Sizes of the last valid call, since most calls repeat them. Assigned atomically, so a race
        # between threads is harmless.
        self._passed: dict[str, int] = {}

    def check(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """Check every leaf and return the tensors for the placeholders, in order.

        The tensors are detached and have the captured layout; the leaves are not modified.

        Raises:
            InputError: A leaf does not match the captured signature.
        """
        for index, spec in self._constants:
            if not same_constant(leaves[index], spec.constant):
                raise _constant_error(spec, leaves[index])
        sizes: dict[str, int] = {}
        tensors = [self._check_tensor(guard, leaves[guard.index], sizes) for guard in self._tensors]
        # Ranges and relations depend on the sizes only.
        if sizes != self._passed:
            self._check_sizes(sizes)
            self._passed = sizes
        if self._written:
            self._check_writable(leaves)
            self._check_overlap(leaves)
        return tensors

    def sizes(self, leaves: Sequence[Any]) -> dict[str, int]:
        """Return the size of each symbol in a call that passed :meth:`check`."""
        return {
            size: leaves[guard.index].shape[axis]
            for guard in self._tensors
            if guard.symbolic
            for axis, size in enumerate(guard.shape)
            if isinstance(size, str)
        }

    def _check_tensor(
        self, guard: _TensorGuard, value: object, sizes: dict[str, int]
    ) -> torch.Tensor:
        # Subclasses are asked only if the class is not a usual one: the check runs on every call.
        if not isinstance(value, torch.Tensor) or (
            type(value) not in _PLAIN and (is_subclass(value) or is_fake_tensor(value))
        ):
            raise self._type_error(guard.spec, value)
        # Their sizes cannot be asked for.
        if value.layout is not torch.strided or value.is_nested:
            raise self._type_error(guard.spec, value)
        if value.dtype is not guard.dtype or value.device != guard.device:
            raise self._tensor_error(guard.spec, value)
        shape = value.shape
        if guard.symbolic:
            if not _bind(guard.shape, shape, sizes):
                raise self._shape_error(guard.spec, value, sizes)
        elif shape != guard.shape:
            raise self._shape_error(guard.spec, value, sizes)
        if value.requires_grad:
            value = value.detach()
        # Compiled code reads the captured layout without a check: other strides give wrong values.
        if guard.spec.order is not None or not value.is_contiguous():
            return _ordered(value, guard.spec.order)
        # The memory of such a view holds the values before negation or conjugation.
        if value.is_neg() or value.is_conj():
            return value.resolve_neg().resolve_conj()
        return value

    def _check_sizes(self, sizes: dict[str, int]) -> None:
        for name, size in sizes.items():
            if not _in_range(size, self._symbols[name]):
                raise self._range_error(name, size)
        for text, holds in self._relations:
            if not _holds(holds, sizes):
                raise self._relation_error(text, sizes)

    def _check_writable(self, leaves: Sequence[Any]) -> None:
        """Refuse an input that torch would refuse to write, after the model has run."""
        outside = not torch.is_inference_mode_enabled()
        for index in self._written:
            value = leaves[index]
            if outside and value.is_inference():
                raise InputError(
                    f"{self._name(index)} was made in torch.inference_mode, and the model writes "
                    "it outside of that mode",
                    fix=f"pass {self._name(index)}.clone(), or call the model in that mode",
                )
            if any(n > 1 and not step for n, step in zip(value.shape, value.stride(), strict=True)):
                raise InputError(
                    f"{self._name(index)} has elements that share memory, as those of expand do, "
                    "and the model writes it",
                    fix=f"pass {self._name(index)}.clone()",
                )

    def _check_overlap(self, leaves: Sequence[Any]) -> None:
        """Refuse an input that the model writes and that shares memory with another input.

        The source would see the write through the other input; a functional graph reads all inputs
        first and writes last.
        """
        # In the order of their start, an input overlaps an earlier one exactly if it starts before
        # the furthest end so far. Inputs that are only read may overlap each other.
        spans = sorted((*span_of(leaves[guard.index]), guard.index) for guard in self._tensors)
        last = last_written = (0, -1)
        for low, high, index in spans:
            written = index in self._written
            end, other = last if written else last_written
            if low < end:
                first, second = (index, other) if written else (other, index)
                raise InputError(
                    f"{self._name(first)} shares memory with {self._name(second)}, and the model "
                    "writes it",
                    fix=f"pass {self._name(second)}.clone()",
                )
            last = max(last, (high, index))
            if written:
                last_written = max(last_written, (high, index))

    def _name(self, index: int) -> str:
        return next(guard.spec.name for guard in self._tensors if guard.index == index)

    def _type_error(self, spec: InputSpec, value: object) -> InputError:
        name = spec.name
        match value:
            case torch.Tensor() if is_fake_tensor(value):
                fix = "pass a tensor with values; to trace or to export a model, take its source"
                came = "a FakeTensor, which has none"
            case torch.Tensor() if is_subclass(value):
                fix = "pass a plain tensor; wrapped tensors belong into the model"
                came = type(value).__name__
            case torch.Tensor() if value.is_nested:
                fix = f"pass a plain tensor, such as {name}.to_padded_tensor(0.0)"
                came = "a nested tensor"
            case torch.Tensor():
                fix = f"pass {name}.to_dense()"
                came = f"a tensor of layout {value.layout}"
            case bool() | int() | float():
                fix = f"pass torch.tensor({value!r}, dtype={spec.dtype})"
                came = f"the {type(value).__name__} {value!r}"
            case None:
                fix = f"pass a torch.Tensor of {spec.dtype}, or compile again without {name}"
                came = "None"
            case _:
                fix = f"pass a torch.Tensor of {spec.dtype}"
                came = type(value).__name__
        return InputError(f"{name}: expected {self._describe(spec)}, got {came}", fix=fix)

    def _tensor_error(self, spec: InputSpec, value: torch.Tensor) -> InputError:
        want, came = self._describe(spec), describe_value(value)
        if value.dtype != spec.dtype:
            fix = f"convert it: {spec.name}.to({spec.dtype})"
        else:
            want, came = f"{want} on {spec.device}", f"{came} on {value.device}"
            fix = f"move it: {spec.name}.to({str(spec.device)!r})"
        return InputError(f"{spec.name}: expected {want}, got {came}", fix=fix)

    def _shape_error(
        self, spec: InputSpec, value: torch.Tensor, sizes: dict[str, int]
    ) -> InputError:
        what = f"{spec.name}: expected {self._describe(spec)}, got {describe_value(value)}"
        if value.ndim != len(spec.shape):
            return InputError(what, fix=f"pass {len(spec.shape)} dimensions")
        for axis, (want, came) in enumerate(zip(spec.shape, value.shape, strict=True)):
            if isinstance(want, str) and sizes.get(want, came) != came:
                label = self._label(want)
                return InputError(
                    f"{what}; {label} is {sizes[want]} in an earlier input",
                    fix=f"give every size {label} the same value",
                )
            if isinstance(want, int) and want != came:
                return InputError(
                    what,
                    fix=f"pass {want} in axis {axis}, or compile with a Dim for axis {axis} of "
                    f"{spec.name} in dynamic_shapes if the model works for other sizes",
                )
        return InputError(what)

    def _range_error(self, name: str, size: int) -> InputError:
        guard = next(g for g in self._tensors if name in g.shape)
        axis = guard.shape.index(name)
        return InputError(
            f"{guard.spec.name}: expected {self._describe(guard.spec)}, got {size} in axis {axis}",
            fix="pass a size in the range, or compile with dynamic_shapes that allow it",
        )

    def _relation_error(self, text: str, sizes: dict[str, int]) -> InputError:
        used = [n for n in sizes if n in _names(text)]
        said = ", ".join(f"{self._where(name)} is {sizes[name]}" for name in used)
        return InputError(
            f"the sizes break {text!r}, which the captured graph relies on: {said}",
            fix="pass sizes for which it holds, or compile with example inputs that have these",
        )

    def _where(self, name: str) -> str:
        guard = next(g for g in self._tensors if name in g.shape)
        return f"{name} (axis {guard.shape.index(name)} of {guard.spec.name})"

    def _label(self, name: str) -> str:
        return self._symbols[name].label or name

    def _describe(self, spec: InputSpec) -> str:
        return describe_input(spec, self._symbols)


def describe_input(spec: InputSpec, symbols: dict[str, SymbolRange]) -> str:
    """Describe a valid input for messages: ``int64[batch, 8] with 1 <= batch <= 512``."""
    if spec.dtype is None:
        return repr(spec.constant)
    sizes = [symbols[s].label or s if isinstance(s, str) else str(s) for s in spec.shape]
    text = f"{_short(spec.dtype)}[{', '.join(sizes)}]"
    ranges = [
        _describe_range(symbols[s].label or s, symbols[s])
        for s in dict.fromkeys(spec.shape)
        if isinstance(s, str)
    ]
    return f"{text} with {' and '.join(ranges)}" if ranges else text


def describe_value(value: torch.Tensor) -> str:
    """Describe a tensor for messages: ``int32[2, 7]``."""
    return f"{_short(value.dtype)}[{', '.join(str(size) for size in value.shape)}]"


def _describe_range(name: str, symbol: SymbolRange) -> str:
    text = f"{name} >= {symbol.low}"
    if symbol.high is not None:
        text = f"{symbol.low} <= {name} <= {symbol.high}"
    return text + (f" ({name} a multiple of {symbol.multiple_of})" * (symbol.multiple_of > 1))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(text: str) -> set[str]:
    return set("".join(c if c.isalnum() or c == "_" else " " for c in text).split())


def _constant_error(spec: InputSpec, value: object) -> InputError:
    came = describe_value(value) if isinstance(value, torch.Tensor) else repr(value)
    return InputError(
        f"{spec.name}: the model was captured for {spec.constant!r}, got {came}",
        fix=f"pass {spec.constant!r}, or compile again for another value",
    )


def _bind(want: Sequence[int | str], came: Sequence[int], sizes: dict[str, int]) -> bool:
    """Compare a shape, and bind each symbol at its first occurrence."""
    if len(want) != len(came):
        return False
    for expected, size in zip(want, came, strict=True):
        known = sizes.setdefault(expected, size) if isinstance(expected, str) else expected
        if known != size:
            return False
    return True


def _holds(condition: SizeFunction, sizes: dict[str, int]) -> bool:
    try:
        return bool(condition(sizes))
    except ZeroDivisionError:
        # A condition such as `a % (a // 4) == 0`, which is undefined for `a` below 4.
        return False


def _in_range(size: int, symbol: SymbolRange) -> bool:
    if size < symbol.low or (symbol.high is not None and size > symbol.high):
        return False
    return size % symbol.multiple_of == 0


def _ordered(value: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """Return ``value`` in a dense layout, with axes in ``order`` from the outermost."""
    value = value.resolve_conj().resolve_neg()
    if order is None:
        return value.contiguous()
    # The axes return to their places, and the strides follow `order`.
    return value.permute(order).contiguous().permute(inverse(order))
