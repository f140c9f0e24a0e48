"""How stored numbers map to real ones: the static half, as data and as canonical text.

``real = (q - zero_point) * scale``, one scale (and zero point) per block. A :class:`QuantSpec` is
everything about that map except the two tensors; the ops carry it as one canonical string, so a
graph's text says all of it, and two specs are equal exactly when their strings are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING

import torch

from qfuse.ir.errors import BlockError, NormalizeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qfuse.ir.sizes import Size

__all__ = [
    "STORAGE_DTYPES",
    "WHOLE_AXIS",
    "Arithmetic",
    "Block",
    "Granularity",
    "QuantSpec",
    "ZeroPointDomain",
    "block_text",
    "dtype_name",
    "dtype_range",
    "parse_block",
    "parse_dtype",
]

WHOLE_AXIS = None
Block = tuple[int | None, ...]

STORAGE_DTYPES = (
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


class ZeroPointDomain(StrEnum):
    """Where the zero point lives.

    ``NONE``: there is none. ``INT``: it is subtracted from the stored number. ``FLOAT_OFFSET``: it
    is a real number that is added after scaling, the stored number being taken relative to the
    middle of its range (the scheme of tinygemm's int4 weights).
    """

    NONE = "none"
    INT = "int"
    FLOAT_OFFSET = "float_offset"


class Granularity(StrEnum):
    """Name of a block's shape relative to the tensor's shape."""

    PER_TENSOR = "per-tensor"
    PER_CHANNEL = "per-channel"
    PER_TOKEN = "per-token"
    PER_GROUP = "per-group"
    BLOCKWISE = "blockwise"


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The order and precision in which a source computes. Sources differ, and codes with them.

    Attributes:
        compute: Type of the multiplication by the scale or its reciprocal.
        reciprocal: Quantize multiplies by ``1 / scale``, taken in the scale's own dtype and then
            rounded to ``compute``; otherwise it divides by the scale.
        zero_point_first: Quantize adds the zero point before rounding instead of after.
    """

    compute: torch.dtype = torch.float32
    reciprocal: bool = True
    zero_point_first: bool = False

    def __str__(self) -> str:
        how = "reciprocal" if self.reciprocal else "divide"
        order = "zp-round" if self.zero_point_first else "round-zp"
        return f"{dtype_name(self.compute)}:{how}:{order}"


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """Affine quantization of one tensor, without its scale and zero point tensors.

    Attributes:
        dtype: Storage type. Sub-byte integers live in ``int8``/``uint8`` with their range.
        quant_min: Least stored number; semantics, since quantize clamps to it.
        quant_max: Greatest stored number.
        block: Elements that share one scale, per axis; ``None`` is the whole axis. The last block
            of an axis may be partial.
        real: Float type of the real side: what quantize reads and dequantize gives.
        arithmetic: How the source computes.
        domain: Where the zero point lives.
    """

    dtype: torch.dtype
    quant_min: int
    quant_max: int
    block: Block
    real: torch.dtype = torch.float32
    arithmetic: Arithmetic = Arithmetic()
    domain: ZeroPointDomain = ZeroPointDomain.INT

    def __post_init__(self) -> None:
        if self.dtype not in STORAGE_DTYPES:
            raise NormalizeError(
                f"{dtype_name(self.dtype)} is not a storage type of quantized tensors",
                fix=f"use one of {', '.join(map(dtype_name, STORAGE_DTYPES))}",
            )
        low, high = dtype_range(self.dtype)
        if not low <= self.quant_min <= self.quant_max <= high:
            raise NormalizeError(
                f"range [{self.quant_min}, {self.quant_max}] does not fit in "
                f"{dtype_name(self.dtype)} [{low}, {high}]"
            )
        if any(b is not None and b < 1 for b in self.block):
            raise BlockError(f"block sizes must be positive, got {self.block}")

    @property
    def rank(self) -> int:
        """Rank of the tensor."""
        return len(self.block)

    @property
    def is_full_range(self) -> bool:
        """Whether the range is the whole storage type."""
        return (self.quant_min, self.quant_max) == dtype_range(self.dtype)

    def with_block(self, block: Sequence[int | None]) -> QuantSpec:
        """Return the same spec with another block."""
        return replace(self, block=tuple(block))

    def grid(self, shape: Sequence[Size]) -> tuple[Size, ...]:
        """Return the shape that scale and zero point must have for a tensor of ``shape``.

        Raises:
            BlockError: The rank of ``shape`` is not the rank of the block.
        """
        if len(shape) != len(self.block):
            raise BlockError(f"block {self.block} has another rank than the tensor {tuple(shape)}")
        return tuple(
            1 if b is None else (size + b - 1) // b
            for size, b in zip(shape, self.block, strict=True)
        )

    def check(self, shape: Sequence[Size], scale_shape: Sequence[Size]) -> None:
        """Check that a scale of ``scale_shape`` tiles a tensor of ``shape``.

        Raises:
            BlockError: It does not.
        """
        want = self.grid(shape)
        if len(want) != len(scale_shape) or any(
            w != s for w, s in zip(want, scale_shape, strict=True)
        ):
            raise BlockError(
                f"a scale of shape {tuple(scale_shape)} does not fit a tensor of shape "
                f"{tuple(shape)} in blocks of {self.block_text()}: it must be {want}",
                fix="give one scale per block, in the rank of the tensor",
            )

    def granularity(self, shape: Sequence[Size]) -> Granularity:
        """Name the block relative to a tensor of ``shape``.

        A singleton grid of any rank is per-tensor. Per-channel and per-token both mean one scale
        per index of the axes that are not whole: per-token when only the last axis is whole.
        """
        split = [
            axis
            for axis, (size, b) in enumerate(zip(shape, self.block, strict=True))
            if b is not None and not (isinstance(size, int) and 0 < size <= b)
        ]
        if not split:
            return Granularity.PER_TENSOR
        if any(self.block[a] != 1 for a in split):
            groups = [a for a in split if self.block[a] != 1]
            return Granularity.PER_GROUP if len(groups) == 1 else Granularity.BLOCKWISE
        last = len(shape) - 1
        if last not in split and all(a in split or shape[a] == 1 for a in range(last)):
            return Granularity.PER_TOKEN if len(split) > 1 or last > 1 else Granularity.PER_CHANNEL
        return Granularity.PER_CHANNEL if len(split) == 1 else Granularity.BLOCKWISE

    def is_per_tensor(self, shape: Sequence[Size]) -> bool:
        """Whether one scale covers a tensor of ``shape``, known without guarding a symbol."""
        return self.granularity(shape) is Granularity.PER_TENSOR

    def block_text(self) -> str:
        """Write the block as ``1x*``; a scalar's block is ``scalar``."""
        return block_text(self.block)

    def __str__(self) -> str:
        return (
            f"{dtype_name(self.dtype)}[{self.quant_min},{self.quant_max}] "
            f"{self.block_text()} {dtype_name(self.real)} {self.arithmetic} {self.domain}"
        )

    @classmethod
    def parse(cls, text: str) -> QuantSpec:
        """Read the canonical text back.

        >>> spec = QuantSpec(torch.int8, -128, 127, (1, None))
        >>> str(spec)
        'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'
        >>> QuantSpec.parse(str(spec)) == spec
        True

        Raises:
            NormalizeError: The text is not a spec.
        """
        return _parse(text)


_TEXT = re.compile(
    r"(?P<dtype>\w+)\[(?P<low>-?\d+),(?P<high>-?\d+)\] (?P<block>\S+) (?P<real>\w+) "
    r"(?P<compute>\w+):(?P<how>reciprocal|divide):(?P<order>zp-round|round-zp) "
    rf"(?P<domain>{'|'.join(ZeroPointDomain)})"
)
_BLOCK = re.compile(r"(\d+|\*)(x(\d+|\*))*")


@cache
def _parse(text: str) -> QuantSpec:
    found = _TEXT.fullmatch(text)
    if found is None:
        raise NormalizeError(f"not the text of a quantization spec: {text!r}")
    return QuantSpec(
        parse_dtype(found["dtype"]),
        int(found["low"]),
        int(found["high"]),
        parse_block(found["block"]),
        parse_dtype(found["real"]),
        Arithmetic(
            parse_dtype(found["compute"]),
            found["how"] == "reciprocal",
            found["order"] == "zp-round",
        ),
        ZeroPointDomain(found["domain"]),
    )


def block_text(block: Block) -> str:
    """Write a block as ``1x*``; a scalar's block is ``scalar``."""
    return "x".join("*" if b is None else str(b) for b in block) or "scalar"


def parse_block(text: str) -> Block:
    """Read the text of a block back.

    Raises:
        NormalizeError: The text is not a block.
    """
    if text == "scalar":
        return ()
    if _BLOCK.fullmatch(text) is None:
        raise NormalizeError(f"not the text of a block: {text!r}")
    return tuple(None if b == "*" else int(b) for b in text.split("x"))


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"int8"`` for ``torch.int8``."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str) -> torch.dtype:
    """Return ``torch.int8`` for ``"int8"``.

    Raises:
        NormalizeError: There is no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise NormalizeError(f"there is no dtype {name!r}")
    return dtype


def dtype_range(dtype: torch.dtype) -> tuple[int, int]:
    """Return the least and the greatest finite value of a storage type."""
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return int(info.min), int(info.max)
