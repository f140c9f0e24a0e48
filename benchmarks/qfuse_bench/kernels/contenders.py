"""The building blocks of the kernel benchmark's families.

A family is prepared once per size of the weight: each contender gets as many copies of its weight
as it takes to read from memory in every call. Calls name the copy to use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as F

from qfuse.targets.huge_pages import HugePages

OURS = "qfuse"
"""The name of the contender that the others are compared with."""

Copies = Callable[[int], int]
"""How many copies of a weight of so many bytes there have to be."""


class Arithmetic(StrEnum):
    """What a kernel multiplies."""

    INT8 = "int8"
    BF16 = "bf16"
    F32 = "f32"


@dataclass(frozen=True, slots=True)
class Shape:
    """A product of ``[m, k]`` and ``[k, n]``."""

    m: int
    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.m} x {self.k} x {self.n}"

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.k * self.n


@dataclass(frozen=True, slots=True)
class Kind:
    """What is known of a contender before it is built.

    Attributes:
        arithmetic: What it multiplies.
        weight_bits: Bits per weight, including scales and zero points.
        x_bytes: Per element of the activation.
    """

    arithmetic: Arithmetic
    weight_bits: float
    x_bytes: int

    def weight_bytes(self, k: int, n: int) -> int:
        """Return the size of a weight."""
        return round(self.weight_bits * k * n / 8)

    def bytes(self, shape: Shape) -> int:
        """Return what a call has to read and write at least; results are float32."""
        x = shape.m * shape.k * self.x_bytes
        return self.weight_bytes(shape.k, shape.n) + x + shape.m * shape.n * 4


@dataclass(frozen=True, slots=True)
class Contender:
    """One linear of random numbers, ready to be called.

    Attributes:
        run: Computes it with the copy of the weight that is named.
        copies: How many there are.
    """

    run: Callable[[int], torch.Tensor]
    copies: int


Contenders = dict[str, Contender]
"""By name, qfuse's first."""

Prepared = Callable[[int], Contenders]
"""Maps the number of rows to the contenders for one size of the weight."""


@dataclass(frozen=True, slots=True)
class Family:
    """Kernels that compute the same.

    Attributes:
        title: Of the table.
        kinds: The contenders by name, ours first.
        prepare: Draws a weight of ``K`` by ``N`` and makes the copies of it.
    """

    title: str
    kinds: Mapping[str, Kind]
    prepare: Callable[[int, int, Copies], Prepared]

    @property
    def peers(self) -> tuple[str, ...]:
        """All contenders except qfuse's."""
        return tuple(name for name in self.kinds if name != OURS)


def codes(*shape: int) -> torch.Tensor:
    """Draw int8."""
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def scales(*shape: int) -> torch.Tensor:
    """Draw scales."""
    return torch.rand(shape) * 0.01 + 0.003


def replicas(tensors: Sequence[torch.Tensor], copies: Copies) -> list[tuple[torch.Tensor, ...]]:
    """Return copies of what belongs to one weight, the given tensors among them."""
    count = copies(sum(tensor.nbytes for tensor in tensors))
    return [tuple(tensors), *(tuple(t.clone() for t in tensors) for _ in range(count - 1))]


def compiled_replicas(
    tensors: Sequence[torch.Tensor], copies: Copies
) -> list[tuple[torch.Tensor, ...]]:
    """Return copies as compiled models keep their constants: in huge pages, if they are allowed."""
    memory = HugePages()
    return [tuple(map(memory.place, copy)) for copy in replicas(tensors, copies)]


def real_linear(x: torch.Tensor, weights: list[tuple[torch.Tensor, ...]]) -> Contender:
    """Return torch's own linear, for copies of weight and bias."""
    return Contender(lambda i: F.linear(x, *weights[i]), len(weights))


def qlinear(
    weight: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor, copies: Copies
) -> Callable[[torch.Tensor, torch.dtype, str], Contender]:
    """Return oneDNN's linear, which takes one scale for all rows.

    It would take int8 activations too, but without AMX that is a reference loop, a thousand times
    slower.
    """
    count = copies(weight.nbytes)
    packed = [torch.ops.onednn.qlinear_prepack(weight, None) for _ in range(count)]
    zeros = torch.zeros_like(w_scale, dtype=torch.int64)
    op = torch.ops.onednn.qlinear_pointwise.default

    def contender(x: torch.Tensor, out: torch.dtype, activation: str) -> Contender:
        out_scale, out_zero = (0.05, 128) if out == torch.uint8 else (1.0, 0)
        algorithm = "none" if activation == "gelu" else ""
        return Contender(
            lambda i: op(
                x, 0.01, 128, packed[i], w_scale, zeros, bias, out_scale, out_zero, out,
                activation, [], algorithm,
            ),
            count,
        )  # fmt: skip

    return contender
