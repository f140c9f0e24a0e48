"""What happens to a fused op's result before it leaves: steps as data, text and meaning."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from qfuse.ir.errors import NormalizeError
from qfuse.ir.quant_spec import dtype_name, parse_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ACTIVATIONS", "Act", "Add", "Cast", "Epilogue", "Mul", "Step"]

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
}
"""Unary activations by name, each with the torch function that is its meaning."""


@dataclass(frozen=True, slots=True)
class Act:
    """Apply an activation."""

    name: str
    args: tuple[float, ...] = ()

    def __str__(self) -> str:
        return f"act({','.join((self.name, *map(repr, self.args)))})"


@dataclass(frozen=True, slots=True)
class Add:
    """Add ``alpha * extras[index]``."""

    index: int
    alpha: float = 1.0

    def __str__(self) -> str:
        return f"add({self.index},{self.alpha!r})"


@dataclass(frozen=True, slots=True)
class Mul:
    """Multiply by ``extras[index]``."""

    index: int

    def __str__(self) -> str:
        return f"mul({self.index})"


@dataclass(frozen=True, slots=True)
class Cast:
    """Round to another float type."""

    dtype: torch.dtype

    def __str__(self) -> str:
        return f"cast({dtype_name(self.dtype)})"


Step = Act | Add | Mul | Cast


@dataclass(frozen=True, slots=True)
class Epilogue:
    """The steps, in order. The text is the steps joined by ``|``; no step is the empty text."""

    steps: tuple[Step, ...] = ()

    def __str__(self) -> str:
        return "|".join(map(str, self.steps))

    def then(self, step: Step) -> Epilogue:
        """Return the epilogue with one more step."""
        return Epilogue((*self.steps, step))

    @classmethod
    def parse(cls, text: str) -> Epilogue:
        """Read the canonical text back.

        >>> Epilogue.parse("act(relu)|add(0,1.0)|cast(bfloat16)").steps[1]
        Add(index=0, alpha=1.0)

        Raises:
            NormalizeError: The text is not an epilogue.
        """
        return _parse(text)

    def apply(self, y: torch.Tensor, extras: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run the steps on ``y``; type promotion is torch's own."""
        for step in self.steps:
            match step:
                case Act(name, args):
                    y = ACTIVATIONS[name](y, *args)
                case Add(index, alpha):
                    y = (
                        torch.add(y, extras[index], alpha=alpha)
                        if alpha != 1
                        else y + extras[index]
                    )
                case Mul(index):
                    y = y * extras[index]
                case Cast(dtype):
                    y = y.to(dtype)
        return y


_STEP = re.compile(r"(?P<kind>act|add|mul|cast)\((?P<args>[^()]*)\)")


@cache
def _parse(text: str) -> Epilogue:
    return Epilogue(tuple(_parse_step(part) for part in text.split("|") if text))


def _parse_step(text: str) -> Step:
    found = _STEP.fullmatch(text)
    if found is None:
        raise NormalizeError(f"not an epilogue step: {text!r}")
    kind, args = found["kind"], found["args"].split(",")
    if kind == "cast":
        return Cast(parse_dtype(found["args"]))
    try:
        if kind == "act" and args[0] in ACTIVATIONS:
            return Act(args[0], tuple(map(float, args[1:])))
        if kind == "add":
            index, alpha = args
            return Add(int(index), float(alpha))
        if kind == "mul":
            return Mul(int(found["args"]))
    except ValueError as error:
        raise NormalizeError(f"not the arguments of an epilogue step: {text!r}") from error
    raise NormalizeError(f"unknown activation {args[0]!r}")
