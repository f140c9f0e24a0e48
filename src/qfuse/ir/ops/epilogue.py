"""Epilogues of fused ops: the epilogue ops as data, canonical text and reference."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache

import torch
import torch.nn.functional as F

from qfuse.ir.dtypes import FLOATS
from qfuse.ir.errors import NormalizeError
from qfuse.ir.quant.reference import dequantize, quantize
from qfuse.ir.quant.spec import QuantSpec, dtype_name, parse_dtype

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


def quick_gelu(x: torch.Tensor, factor: float = 1.702) -> torch.Tensor:
    """Return ``x * sigmoid(factor * x)``, rounded once as the activations of torch are."""
    wide = x.float() if x.dtype in _NARROW else x
    return (wide * torch.sigmoid(wide * factor)).to(x.dtype)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Return ``relu(x) ** 2``."""
    return torch.square(torch.relu(x))


ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "leaky_relu": F.leaky_relu,
    "elu": torch.ops.aten.elu.default,
    "mish": F.mish,
    "quick_gelu": quick_gelu,
    "squared_relu": squared_relu,
}
"""Unary activations by name, each with its reference.

Arguments: ``hardtanh`` low and high bound, ``leaky_relu`` slope, ``elu`` alpha, scale and input
scale, ``quick_gelu`` the factor in the sigmoid.
"""

# Marks the parameters of a stored operand in the text.
_STORED = "stored,"


@dataclass(frozen=True, slots=True)
class Act:
    """Apply an activation."""

    name: str
    args: tuple[float, ...] = ()

    def __str__(self) -> str:
        return f"act({','.join((self.name, *map(repr, self.args)))})"


@dataclass(frozen=True, slots=True)
class _ExtraParams:
    """Quantization parameters among the extras.

    Attributes:
        scale: Index of the scale among the extras.
        zero_point: Index of the zero point among the extras, if there is one.
        spec: Everything else; its scales have one level.
    """

    scale: int
    zero_point: int | None
    spec: QuantSpec

    def __post_init__(self) -> None:
        if self.spec.outer is not None:
            raise NormalizeError(f"an epilogue op has scales of one level: {self.spec}")

    @property
    def text(self) -> str:
        """The arguments as text."""
        zero = "-" if self.zero_point is None else self.zero_point
        return f"{self.scale},{zero},{self.spec}"

    def values(
        self, extras: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None, QuantSpec]:
        """Return the arguments after the tensor for the reference of quantize or dequantize."""
        zero = None if self.zero_point is None else extras[self.zero_point]
        return extras[self.scale], zero, self.spec


@dataclass(frozen=True, slots=True)
class Round(_ExtraParams):
    """Quantize and dequantize: an intermediate value that the source rounds."""

    def __str__(self) -> str:
        return f"round({self.text})"

    def apply(self, y: torch.Tensor, extras: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the values rounded to the quantization grid."""
        params = self.values(extras)
        return dequantize(quantize(y, *params), *params)


@dataclass(frozen=True, slots=True)
class Stored(_ExtraParams):
    """The parameters of an operand that is stored quantized, and dequantized before its use."""

    def apply(self, q: torch.Tensor, extras: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the float operand."""
        return dequantize(q, *self.values(extras))


@dataclass(frozen=True, slots=True)
class Add:
    """Add ``alpha * extras[index]``, which may be stored quantized."""

    index: int
    alpha: float = 1.0
    stored: Stored | None = None

    def __str__(self) -> str:
        return f"add({self.index},{self.alpha!r}{_stored_text(self.stored)})"

    def operand(self, extras: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the float operand."""
        other = extras[self.index]
        return other if self.stored is None else self.stored.apply(other, extras)


@dataclass(frozen=True, slots=True)
class Mul:
    """Multiply by ``extras[index]``, which may be rounded first, or be stored quantized."""

    index: int
    rounded: Round | None = None
    stored: Stored | None = None

    def __post_init__(self) -> None:
        if self.rounded is not None and self.stored is not None:
            raise NormalizeError(f"a quantized factor is not rounded: {self}")

    def __str__(self) -> str:
        rounded = "" if self.rounded is None else f",{self.rounded.text}"
        return f"mul({self.index}{rounded}{_stored_text(self.stored)})"

    def operand(self, extras: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the float operand."""
        change = self.rounded or self.stored
        other = extras[self.index]
        return other if change is None else change.apply(other, extras)


def _stored_text(stored: Stored | None) -> str:
    return "" if stored is None else f",{_STORED}{stored.text}"


@dataclass(frozen=True, slots=True)
class Prelu:
    """Multiply values that are not positive by ``extras[index]``, the slopes, which broadcast."""

    index: int

    def __str__(self) -> str:
        return f"prelu({self.index})"

    def apply(self, y: torch.Tensor, extras: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the result."""
        return torch.where(y > 0, y, y * extras[self.index])


@dataclass(frozen=True, slots=True)
class Cast:
    """Round to another float dtype."""

    dtype: torch.dtype

    def __str__(self) -> str:
        return f"cast({dtype_name(self.dtype)})"


class GluOrder(StrEnum):
    """Which half of the last axis is the gate."""

    GATE_FIRST = "gate-first"
    UP_FIRST = "up-first"


@dataclass(frozen=True, slots=True)
class Glu:
    """GLU: multiply the activation of one half of the last axis by the other half."""

    act: Act
    order: GluOrder

    def __str__(self) -> str:
        return f"glu({','.join((self.act.name, *map(repr, self.act.args), self.order))})"

    def apply(self, y: torch.Tensor) -> torch.Tensor:
        """Return the product.

        Args:
            y: Tensor with an even last axis.
        """
        half = y.shape[-1] // 2
        # Slices rather than a split, whose number of results could depend on a size.
        parts = y[..., :half], y[..., half:]
        gate, up = parts if self.order is GluOrder.GATE_FIRST else parts[::-1]
        return ACTIVATIONS[self.act.name](gate, *self.act.args) * up


EpilogueOp = Act | Add | Mul | Prelu | Cast | Glu | Round


@dataclass(frozen=True, slots=True)
class Epilogue:
    """The epilogue ops in order. The text joins them with ``|``; an empty epilogue is ""."""

    ops: tuple[EpilogueOp, ...] = ()

    def __str__(self) -> str:
        return "|".join(map(str, self.ops))

    def then(self, step: EpilogueOp) -> Epilogue:
        """Return the epilogue with one more op."""
        return Epilogue((*self.ops, step))

    @classmethod
    def parse(cls, text: str) -> Epilogue:
        """Parse the canonical text.

        >>> Epilogue.parse("act(relu)|add(0,1.0)|cast(bfloat16)").ops[1]
        Add(index=0, alpha=1.0)

        Raises:
            NormalizeError: The text is not an epilogue.
        """
        return _parse(text)

    def apply(self, y: torch.Tensor, extras: Sequence[torch.Tensor]) -> torch.Tensor:
        """Apply the epilogue to ``y``; type promotion is torch's own."""
        for step in self.ops:
            match step:
                case Act(name, args):
                    y = ACTIVATIONS[name](y, *args)
                case Add(alpha=alpha):
                    other = step.operand(extras)
                    y = y + other if alpha == 1 else torch.add(y, other, alpha=alpha)
                case Mul():
                    y = y * step.operand(extras)
                case Round() | Prelu():
                    y = step.apply(y, extras)
                case Cast(dtype):
                    y = y.to(dtype)
                case Glu():
                    y = step.apply(y)
        return y

    def widened(self) -> Epilogue:
        """Return the epilogue that computes in float64."""
        return Epilogue(tuple(map(_widened, self.ops)))

    def float_types(
        self, first: torch.dtype, extras: Sequence[torch.Tensor]
    ) -> tuple[torch.dtype, ...]:
        """Return the float dtype before every op, and the one after the last.

        Args:
            first: Dtype of the epilogue's input, which has at least one axis.
            extras: The operands, of which only dtypes and ranks are used.
        """
        types = [first]
        for step in self.ops:
            types.append(_type_behind(step, types[-1], extras))
        return tuple(types)


def _widened(step: EpilogueOp) -> EpilogueOp:
    match step:
        case Cast(dtype) if dtype in FLOATS:
            return Cast(torch.float64)
        case Round():
            return replace(step, spec=step.spec.widened())
        case Mul(rounded=Round() as rounded):
            return replace(step, rounded=replace(rounded, spec=rounded.spec.widened()))
        case Add(stored=Stored() as stored) | Mul(stored=Stored() as stored):
            return replace(step, stored=replace(stored, spec=stored.spec.widened()))
        case _:
            return step


def _type_behind(
    step: EpilogueOp, float_dtype: torch.dtype, extras: Sequence[torch.Tensor]
) -> torch.dtype:
    match step:
        case Cast(dtype):
            return dtype
        case Round():
            return step.spec.float_dtype
        case Add(index, stored=params) | Mul(index, None, params) | Mul(index, params, None):
            other = extras[index].dtype if params is None else params.spec.float_dtype
            axes = extras[index].dim()
        case Prelu(index):
            other, axes = extras[index].dtype, extras[index].dim()
        case _:
            return float_dtype
    # A 0-d float does not promote a float tensor that has axes.
    return (
        torch.promote_types(float_dtype, other)
        if axes or not other.is_floating_point
        else float_dtype
    )


_STEP = re.compile(r"(?P<kind>act|add|mul|prelu|cast|glu|round)\((?P<args>[^()]*)\)")


@cache
def _parse(text: str) -> Epilogue:
    return Epilogue(tuple(_parse_step(part) for part in text.split("|") if text))


def _parse_step(text: str) -> EpilogueOp:
    found = _STEP.fullmatch(text)
    if found is None:
        raise NormalizeError(f"not an epilogue step: {text!r}")
    try:
        return _PARSERS[found["kind"]](found["args"])
    except ValueError as error:
        raise NormalizeError(f"not the arguments of an epilogue step: {text!r}") from error


def _parse_act(text: str) -> Act:
    name, *args = text.split(",")
    if name not in ACTIVATIONS:
        raise NormalizeError(f"unknown activation {name!r}")
    return Act(name, tuple(map(float, args)))


def _parse_glu(text: str) -> Glu:
    act, _, halves = text.rpartition(",")
    return Glu(_parse_act(act), GluOrder(halves))


def _parse_add(text: str) -> Add:
    index, alpha, *stored = text.split(",", 2)
    return Add(int(index), float(alpha), _parse_stored(*stored))


def _parse_mul(text: str) -> Mul:
    index, *params = text.split(",", 1)
    if params and not params[0].startswith(_STORED):
        return Mul(int(index), Round(*_parse_params(*params)))
    return Mul(int(index), stored=_parse_stored(*params))


def _parse_stored(text: str | None = None) -> Stored | None:
    if text is None:
        return None
    if not text.startswith(_STORED):
        raise ValueError(text)
    return Stored(*_parse_params(text.removeprefix(_STORED)))


def _parse_params(text: str) -> tuple[int, int | None, QuantSpec]:
    scale, zero, spec = text.split(",", 2)
    return int(scale), None if zero == "-" else int(zero), QuantSpec.parse(spec)


_PARSERS: dict[str, Callable[[str], EpilogueOp]] = {
    "act": _parse_act,
    "add": _parse_add,
    "mul": _parse_mul,
    "prelu": lambda text: Prelu(int(text)),
    "cast": lambda text: Cast(parse_dtype(text)),
    "glu": _parse_glu,
    "round": lambda text: Round(*_parse_params(text)),
}
