"""What ``make bench-kernels`` compares: kernels of qfuse beside ops of torch that compute the same.

A family is prepared once per size of the weight: each contender gets as many copies of its weight
as it takes to read from memory in every call. Calls name the copy to use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from qfuse.kernels import linear_w8a8, linear_w8a8_quantized, linear_w8a16, pack_weight

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["FAMILIES", "OURS", "Arithmetic", "Contender", "Copies", "Family", "Kind", "Shape"]

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
        weight_bits: Stored per weight, scales and zero points included.
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
Prepared = Callable[[int], Contenders]
"""Takes the rows, and gives the contenders for one size of the weight."""


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
        """All but ours."""
        return tuple(name for name in self.kinds if name != OURS)


def _codes(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def _scales(count: int) -> torch.Tensor:
    return torch.rand(count) * 0.01 + 0.003


def _replicas(tensors: Sequence[torch.Tensor], copies: Copies) -> list[tuple[torch.Tensor, ...]]:
    """Return copies of what belongs to one weight, the given tensors among them."""
    count = copies(sum(tensor.nbytes for tensor in tensors))
    return [tuple(tensors), *(tuple(t.clone() for t in tensors) for _ in range(count - 1))]


def _packed(weight: torch.Tensor, copies: Copies) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return copies of the packed weight with its sums."""
    return [(packed, sums) for packed, sums in _replicas(pack_weight(weight), copies)]


def _real_linear(x: torch.Tensor, weights: list[tuple[torch.Tensor, ...]]) -> Contender:
    return Contender(lambda i: F.linear(x, *weights[i]), len(weights))


def _qlinear(
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


def _w8a8(k: int, n: int, copies: Copies) -> Prepared:
    """Stored activations with a scale per row, against one scale for all and unfused scales."""
    weight, w_scale, bias = _codes(n, k), _scales(n), torch.randn(n)
    ours = _packed(weight, copies)
    plain = _replicas([weight], copies)
    qlinear = _qlinear(weight, w_scale, bias, copies)

    def contenders(m: int) -> Contenders:
        x, x_scale = _codes(m, k), _scales(m)
        column = x_scale[:, None]
        unsigned = (x.to(torch.int16) + 128).to(torch.uint8)

        def int_mm(i: int) -> torch.Tensor:
            # torch.compile fuses what follows `_int_mm` into one pass; this is nearly that.
            sums = torch.ops.aten._int_mm.default(x, plain[i][0].t())
            return torch.addcmul(bias, sums * column, w_scale)

        return {
            OURS: Contender(
                lambda i: linear_w8a8(x, x_scale, None, *ours[i], w_scale, bias=bias), len(ours)
            ),
            "qlinear": qlinear(unsigned, torch.float32, "none"),
            "_int_mm": Contender(int_mm, len(plain)),
        }

    return contenders


def _w8a8_static(out: torch.dtype, activation: str) -> Callable[[int, int, Copies], Prepared]:
    """One scale for all rows, as static quantization has it, to another type or with a step."""

    def prepare(k: int, n: int, copies: Copies) -> Prepared:
        weight, w_scale, bias = _codes(n, k), _scales(n), torch.randn(n)
        ours = _packed(weight, copies)
        qlinear = _qlinear(weight, w_scale, bias, copies)
        steps = "" if activation == "none" else f"act({activation})"
        scale, zero = torch.tensor([0.01]), torch.tensor([128], dtype=torch.int32)
        out_scale = torch.tensor([0.05])

        def contenders(m: int) -> Contenders:
            x = (_codes(m, k).to(torch.int16) + 128).to(torch.uint8)

            def codes(i: int) -> torch.Tensor:
                return linear_w8a8_quantized(
                    x, scale, zero, *ours[i], w_scale, bias=bias, epilogue=steps,
                    out_scale=out_scale, out_zero_point=zero, quant_min=0, quant_max=255,
                    out_dtype=torch.uint8,
                )  # fmt: skip

            def real(i: int) -> torch.Tensor:
                return linear_w8a8(
                    x, scale, zero, *ours[i], w_scale, bias=bias, epilogue=steps, real=out
                )

            run = codes if out == torch.uint8 else real
            return {OURS: Contender(run, len(ours)), "qlinear": qlinear(x, out, activation)}

        return contenders

    return prepare


def _weight_only8(dtype: torch.dtype) -> Callable[[int, int, Copies], Prepared]:
    """Real activations; the GEMM of their type reads weights two or four times as large."""

    def prepare(k: int, n: int, copies: Copies) -> Prepared:
        weight, w_scale, bias = _codes(n, k), _scales(n), torch.randn(n)
        ours = _packed(weight, copies)
        real = _replicas([(weight * w_scale[:, None]).to(dtype), bias.to(dtype)], copies)

        def contenders(m: int) -> Contenders:
            x = torch.randn(m, k).to(dtype)
            return {
                OURS: Contender(
                    lambda i: linear_w8a16(x, ours[i][0], w_scale, bias=bias), len(ours)
                ),
                "linear": _real_linear(x, real),
            }

        return contenders

    return prepare


_INT8 = Kind(Arithmetic.INT8, 8, 1)
_BF16 = Kind(Arithmetic.BF16, 16, 2)
_F32 = Kind(Arithmetic.F32, 32, 4)
_STATIC = {OURS: _INT8, "qlinear": _INT8}

FAMILIES: Mapping[str, Family] = {
    "w8a8": Family(
        "int8 linears, activations per token",
        {OURS: _INT8, "qlinear": _INT8, "_int_mm": _INT8},
        _w8a8,
    ),
    "w8a16": Family(
        "int8 weights, bfloat16 activations",
        {OURS: Kind(Arithmetic.BF16, 8, 2), "linear": _BF16},
        _weight_only8(torch.bfloat16),
    ),
    "w8a32": Family(
        "int8 weights, float32 activations",
        {OURS: Kind(Arithmetic.F32, 8, 4), "linear": _F32},
        _weight_only8(torch.float32),
    ),
    "w8a8-static": Family(
        "int8 linears, one scale for all rows", _STATIC, _w8a8_static(torch.float32, "none")
    ),
    "w8a8-bf16": Family(
        "int8 linears, one scale for all rows, bfloat16 results",
        _STATIC,
        _w8a8_static(torch.bfloat16, "none"),
    ),
    "w8a8-codes": Family(
        "int8 linears, one scale for all rows, quantized results",
        _STATIC,
        _w8a8_static(torch.uint8, "none"),
    ),
    "w8a8-gelu": Family(
        "int8 linears, one scale for all rows, gelu, quantized results",
        _STATIC,
        _w8a8_static(torch.uint8, "gelu"),
    ),
}
"""By name."""
