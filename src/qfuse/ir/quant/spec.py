"""How quantized values map to real values: the static part, as data and as canonical text.

``real = (q - zero_point) * scale``, one scale (and zero point) per block. A :class:`QuantSpec` is
everything about that map except the two tensors. Ops carry it as one canonical string, so the
text of a graph is complete, and two specs are equal exactly if their strings are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache

import torch

from qfuse.ir.dtypes import bit_width
from qfuse.ir.errors import BlockError, NormalizeError
from qfuse.ir.quant.block import block_grid, block_text, check_grid, parse_block
from qfuse.ir.quant.element import CONTAINER, Element, ScaleFormat, greatest
from qfuse.ir.sizes import Size

Block = tuple[int | None, ...]

STORAGE_DTYPES = (
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
)


class ZeroPointDomain(StrEnum):
    """Where the zero point lives.

    ``NONE``: symmetric. ``INT``: subtracted from the quantized value. ``FLOAT_OFFSET``: a float
    added after scaling, with the quantized value taken relative to the middle of its range (the
    scheme of tinygemm's int4 weights).
    """

    NONE = "none"
    INT = "int"
    FLOAT_OFFSET = "float_offset"


class Granularity(StrEnum):
    """A block's shape relative to the tensor's shape."""

    PER_TENSOR = "per-tensor"
    PER_CHANNEL = "per-channel"
    PER_TOKEN = "per-token"
    PER_GROUP = "per-group"
    BLOCKWISE = "blockwise"


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The order and precision of the source's arithmetic, which affects the quantized values.

    Attributes:
        compute: Dtype of the multiplication by the scale or its reciprocal.
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
    """Quantization of one tensor, without its scale and zero point tensors.

    An optional second level of scales has its own blocks; the scale of an element is the product
    of the two.

    Attributes:
        dtype: Storage dtype. Sub-byte integers are stored in ``int8``/``uint8`` with their range,
            elements of 4 and 6 bits as values in ``float8_e4m3fn``.
        quant_min: Smallest quantized value; affects results, since quantize clamps to it.
        quant_max: Largest quantized value.
        block: Elements that share one scale, per axis; ``None`` is the whole axis. The last block
            of an axis may be partial.
        float_dtype: Float dtype: the input of quantize and the result of dequantize.
        arithmetic: Order and precision of the source's arithmetic.
        domain: Where the zero point lives.
        element: Number format within the storage dtype; quantize rounds to it after clamping to
            the range, whose bounds are those of the element, rounded outward.
        scale_format: Format of the scale.
        outer: Block of the second level of scales, ``None`` if there is one level.
    """

    dtype: torch.dtype
    quant_min: int
    quant_max: int
    block: Block
    float_dtype: torch.dtype = torch.float32
    arithmetic: Arithmetic = Arithmetic()
    domain: ZeroPointDomain = ZeroPointDomain.INT
    element: Element = Element.WHOLE
    scale_format: ScaleFormat = ScaleFormat.FLOAT
    outer: Block | None = None

    def __post_init__(self) -> None:
        if self.dtype not in STORAGE_DTYPES:
            raise NormalizeError(
                f"{dtype_name(self.dtype)} is not a storage type of quantized tensors",
                fix=f"use one of {', '.join(map(dtype_name, STORAGE_DTYPES))}",
            )
        low, high = stored_range(self.dtype, self.element)
        if not low <= self.quant_min <= self.quant_max <= high:
            raise NormalizeError(
                f"range [{self.quant_min}, {self.quant_max}] does not fit in "
                f"{stored_name(self.dtype, self.element)} [{low}, {high}]"
            )
        if any(b is not None and b < 1 for b in (*self.block, *(self.outer or ()))):
            raise BlockError(f"block sizes must be positive, got {self.block}, {self.outer}")
        self._check_formats()

    def _check_formats(self) -> None:
        """Check the fields that microscaling adds."""
        if self.outer is not None and len(self.outer) != len(self.block):
            raise BlockError(f"the two levels of scales have blocks {self.block} and {self.outer}")
        if self.outer is not None and self.scale_format is ScaleFormat.E8M0:
            raise NormalizeError(f"{self}: powers of two have no second level of scales")
        narrow = self.element is not Element.WHOLE or self.scale_format is not ScaleFormat.FLOAT
        if (narrow or self.outer is not None) and (
            self.domain is not ZeroPointDomain.NONE or self.arithmetic.compute is not torch.float32
        ):
            raise NormalizeError(
                f"{self} has a zero point, or is not computed in float32",
                fix="scales in narrow formats and scales of two levels are without and in float32",
            )

    @property
    def rank(self) -> int:
        """Rank of the tensor."""
        return len(self.block)

    @property
    def bits(self) -> int:
        """Bits per quantized value when packed."""
        if self.element is not Element.WHOLE:
            return 1 + self.element.exponent_bits + self.element.mantissa_bits
        if self.dtype.is_floating_point:
            return bit_width(self.dtype)
        # A range of a single value still takes a bit.
        return max(1, (self.quant_max - self.quant_min).bit_length())

    @property
    def is_plain(self) -> bool:
        """Whether elements and scales are in their default formats, with one level of scales."""
        whole = self.element is Element.WHOLE and self.scale_format is ScaleFormat.FLOAT
        return whole and self.outer is None

    @property
    def is_full_range(self) -> bool:
        """Whether the range is that of the whole storage dtype."""
        return (self.quant_min, self.quant_max) == stored_range(self.dtype, self.element)

    def widened(self) -> QuantSpec:
        """Return the spec that computes in float64, except with narrow scale formats."""
        # Such specs have to compute in float32 (`_check_formats`).
        if not self.is_plain:
            return self
        arithmetic = replace(self.arithmetic, compute=torch.float64)
        return replace(self, float_dtype=torch.float64, arithmetic=arithmetic)

    def with_block(
        self, block: Sequence[int | None], outer: Sequence[int | None] | None = None
    ) -> QuantSpec:
        """Return the same spec with other blocks, one per level of scales."""
        assert (outer is None) == (self.outer is None), f"a block for every level: {self}"
        return replace(self, block=tuple(block), outer=None if outer is None else tuple(outer))

    def grid(self, shape: Sequence[Size]) -> tuple[Size, ...]:
        """Return the shape that scale and zero point must have for a tensor of ``shape``.

        Raises:
            BlockError: The rank of ``shape`` is not the rank of the block.
        """
        return block_grid(self.block, shape)

    def check(self, shape: Sequence[Size], scale_shape: Sequence[Size]) -> None:
        """Check that a scale of ``scale_shape`` tiles a tensor of ``shape``.

        Raises:
            BlockError: The shapes do not match.
        """
        check_grid(self.block, shape, scale_shape)

    def check_outer(self, shape: Sequence[Size], scale_shape: Sequence[Size] | None) -> None:
        """Check that the second level of scales is present if required, and tiles the tensor.

        Raises:
            BlockError: It is missing, unexpected, or does not tile the tensor.
        """
        if (scale_shape is None) != (self.outer is None):
            raise BlockError(
                f"a second level of scales is given or said to be given, not both: {self}"
            )
        if scale_shape is not None and self.outer is not None:
            check_grid(self.outer, shape, scale_shape)

    def granularity(self, shape: Sequence[Size]) -> Granularity:
        """Name the block relative to a tensor of ``shape``.

        A singleton grid of any rank is per-tensor. Per-channel and per-token both have one scale
        per index of the axes that are not whole: per-token if only the last of more than two axes
        is whole.
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

    def block_text(self) -> str:
        """Write the block as ``1x*``; a scalar's block is ``scalar``."""
        return block_text(self.block)

    def __str__(self) -> str:
        text = (
            f"{stored_name(self.dtype, self.element)}[{self.quant_min},{self.quant_max}] "
            f"{self.block_text()} {dtype_name(self.float_dtype)} {self.arithmetic} {self.domain}"
        )
        if self.scale_format is not ScaleFormat.FLOAT:
            text += f" {self.scale_format}"
        return text if self.outer is None else f"{text} outer={block_text(self.outer)}"

    @classmethod
    def parse(cls, text: str) -> QuantSpec:
        """Parse the canonical text.

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
    r"(?P<dtype>\w+)\[(?P<low>-?\d+),(?P<high>-?\d+)\] (?P<block>\S+) (?P<float_dtype>\w+) "
    r"(?P<compute>\w+):(?P<how>reciprocal|divide):(?P<order>zp-round|round-zp) "
    rf"(?P<domain>{'|'.join(ZeroPointDomain)})( (?P<scale>e8m0|e4m3))?( outer=(?P<outer>\S+))?"
)


# Rules parse the specs of every node that they look at, and the texts repeat.
@cache
def _parse(text: str) -> QuantSpec:
    found = _TEXT.fullmatch(text)
    if found is None:
        raise NormalizeError(f"not the text of a quantization spec: {text!r}")
    dtype, element = parse_stored(found["dtype"])
    return QuantSpec(
        dtype,
        int(found["low"]),
        int(found["high"]),
        parse_block(found["block"]),
        parse_dtype(found["float_dtype"]),
        Arithmetic(
            parse_dtype(found["compute"]),
            found["how"] == "reciprocal",
            found["order"] == "zp-round",
        ),
        ZeroPointDomain(found["domain"]),
        element,
        ScaleFormat(found["scale"] or ScaleFormat.FLOAT),
        None if found["outer"] is None else parse_block(found["outer"]),
    )


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


def stored_name(dtype: torch.dtype, element: Element) -> str:
    """Return ``"float4_e2m1"``, or the name of the storage dtype if the element is the default."""
    return element.value or dtype_name(dtype)


def parse_stored(name: str) -> tuple[torch.dtype, Element]:
    """Return storage dtype and element format; the inverse of :func:`stored_name`.

    Raises:
        NormalizeError: There is no such type.
    """
    if name in set(Element) - {Element.WHOLE}:
        return CONTAINER, Element(name)
    return parse_dtype(name), Element.WHOLE


def stored_range(dtype: torch.dtype, element: Element) -> tuple[int, int]:
    """Return the smallest integer range that contains all finite values of the format.

    Raises:
        NormalizeError: The element is not stored in this type.
    """
    if element is Element.WHOLE:
        return dtype_range(dtype)
    if dtype is not CONTAINER:
        raise NormalizeError(f"{element} is stored in {dtype_name(CONTAINER)}, not {dtype}")
    bound = math.ceil(greatest(dtype, element))
    return -bound, bound


def dtype_range(dtype: torch.dtype) -> tuple[int, int]:
    """Return the smallest and largest finite value of a storage dtype."""
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return int(info.min), int(info.max)
