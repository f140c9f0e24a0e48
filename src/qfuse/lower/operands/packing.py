"""Weights in the kernels' layout, packed once per lowering for all their users."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.views import QuantParams
from qfuse.ir.quant.spec import QuantSpec
from qfuse.kernels import (
    PackedGroups,
    pack_bytes,
    pack_floats,
    pack_grouped,
    pack_weight4,
    weight_sums,
)
from qfuse.kernels.pack import BLOCK
from qfuse.lower.operands.groups import first_value, group_scales, group_zero_points
from qfuse.rewrite.prelude import Node, Rewriter
from qfuse.targets.huge_pages import HugePages

Made = TypeVar("Made")

_FOUR = 4


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed weight.

    Attributes:
        weight: int8 values in the kernels' layout.
        sums: Per output feature, the sum of the weight minus its zero point.
        zero_point: Per output feature, of the int8 values; ``None`` if all are zero.
    """

    weight: torch.Tensor
    sums: torch.Tensor
    zero_point: torch.Tensor | None


class ValueLayout(Hashable, Protocol):
    """How a kernel packs the weight of a convolution; equal layouts pack the same."""

    def pack(self, weight: torch.Tensor, /) -> torch.Tensor:
        """Pack the quantized values of a weight."""


class TapLayout(Hashable, Protocol):
    """How a kernel of integer sums packs the weight of a convolution; equal layouts pack the same.

    Weights are int8. A zero point has one number for every output channel.
    """

    def pack(self, weight: torch.Tensor, zero_point: torch.Tensor | None) -> torch.Tensor:
        """Pack a weight."""

    def sums(self, weight: torch.Tensor, zero_point: torch.Tensor | None) -> torch.Tensor:
        """Sum the weight minus its zero point for every output channel."""


@dataclass(slots=True)
class Packer:
    """Packs constants and caches them by identity, for all kernels of a lowering.

    Attributes:
        memory: Where packed tensors lie, in the order in which they were packed.
    """

    memory: HugePages = field(default_factory=HugePages)
    _known: dict[Hashable, tuple[tuple[torch.Tensor | None, ...], Any]] = field(
        default_factory=dict
    )
    _placed: set[int] = field(default_factory=set)

    def once(
        self, make: Callable[[], Made], tensors: Sequence[torch.Tensor | None], *rest: Hashable
    ) -> Made:
        """Return the cached result of ``make`` for these tensors and ``rest``, or call it.

        The cache keeps the tensors alive: otherwise a new tensor could have the same ``id``.
        """
        key = (*map(id, tensors), *rest)
        if key not in self._known:
            self._known[key] = tuple(tensors), self._place(make())
        made: Made = self._known[key][1]
        return made

    def _place(self, made: Any) -> Any:
        """Return what was made, with tensors in memory that is fast to read."""
        if isinstance(made, torch.Tensor):
            if id(made) in self._placed:  # packed for other kernels before
                return made
            placed = self.memory.place(made)
            self._placed.add(id(placed))  # the cache keeps it alive
            return placed
        if isinstance(made, tuple):
            parts = map(self._place, made)
            return type(made)(*parts) if hasattr(made, "_fields") else tuple(parts)
        if is_dataclass(made) and not isinstance(made, type):
            return replace(
                made, **{f.name: self._place(getattr(made, f.name)) for f in fields(made)}
            )
        return made

    def pack_values(self, stored: torch.Tensor, spec: QuantSpec, bits: int) -> torch.Tensor:
        """Pack the quantized values of a weight; four bits must fit them: see ``check_four_bits``.

        Packed values are the quantized values minus ``least_value``, of any dtype.
        """
        least = least_value(stored, spec, bits)
        pack: Callable[[torch.Tensor], torch.Tensor]
        pack = pack_weight4 if bits == _FOUR else pack_bytes
        if stored.dtype.is_floating_point:
            pack = pack_floats
        return self._packed_once(lambda: pack(_moved(stored, least, bits)), stored, bits, least)

    def pack(self, node: Node, params: QuantParams, *, halves: bool = False) -> Packed:
        """Pack the constant of ``node``, with ``halves`` its GLU halves separately.

        uint8 weights are packed as int8, which shifts their zero point by 128.
        """
        stored = _constant(node)
        zero = signed_zero_point(stored, params)
        apart = _apart(stored, halves=halves)

        def packed() -> Packed:
            least = least_value(stored, params.spec, 8)
            signed = _moved(stored, least, 8)
            full = None if zero is None else zero.expand(stored.shape[0]).contiguous()
            # Cached by themselves, so that users with other parameters share them.
            pack = partial(pack_bytes, signed, halves=apart)
            values = self._packed_once(pack, stored, 8, least, apart)
            return Packed(values, weight_sums(signed, full), full)

        numbers = None if zero is None else tuple(zero.tolist())
        return self.once(packed, (stored,), "rows", numbers, apart)

    def pack_taps(
        self, node: Node, params: QuantParams, channels: int, layout: TapLayout
    ) -> Packed:
        """Pack the constant of ``node``, the weight of a convolution.

        uint8 weights are packed as int8, which shifts their zero point by 128.

        Args:
            node: The weight.
            params: Its parameters.
            channels: Output channels; groups of a transposed convolution share zero points.
            layout: The layout of a kernel.
        """
        stored = _constant(node)
        zero = signed_zero_point(stored, params)

        def packed() -> Packed:
            signed = _moved(stored, least_value(stored, params.spec, 8), 8)
            full = None if zero is None else zero.repeat(channels // zero.numel())
            return Packed(layout.pack(signed, full), layout.sums(signed, full), full)

        numbers = None if zero is None else tuple(zero.tolist())
        return self.once(packed, (stored,), "taps", numbers, layout)

    def tap_values(
        self, stored: torch.Tensor, spec: QuantSpec, bits: int, layout: ValueLayout
    ) -> torch.Tensor:
        """Pack the quantized values of the weight of a convolution; see :meth:`pack_values`."""
        least = least_value(stored, spec, bits)

        def packed() -> torch.Tensor:
            return layout.pack(_moved(stored, least, bits))

        return self.once(packed, (stored,), "tap codes", bits, least, layout)

    def pack_grouped(
        self, node: Node, params: QuantParams, *, four: bool, halves: bool = False
    ) -> PackedGroups:
        """Pack the constant of ``node`` for matmuls with quantized activations.

        With four bits the least value becomes 0, and uint8 becomes int8: both shift the zero
        points by the same amount.
        """
        stored, bits = _constant(node), _FOUR if four else 8
        apart = _apart(stored, halves=halves)

        def packed() -> PackedGroups:
            least = least_value(stored, params.spec, bits)
            scales = group_scales(params, stored.shape).t()
            zeros = (group_zero_points(params, stored.shape) - least).t()
            values = _moved(stored, least, bits)
            made = pack_grouped(values, scales, _as_one(zeros), halves=apart)
            # Other kernels may have packed the same values.
            weight = self._packed_once(lambda: made.weight, stored, bits, least, apart)
            return made._replace(weight=weight)

        tensors = (stored, *map(constant_of, params.tensors))
        return self.once(packed, tensors, "groups", str(params.spec), bits, apart)

    def contiguous(self, node: Node, rw: Rewriter) -> Node:
        """Return a contiguous weight; constants are copied ahead of time."""
        stored = constant_of(node)
        if stored is None:
            return rw.call(torch.ops.aten.contiguous.default, node)
        if stored.is_contiguous():
            return node
        laid_out = self.once(stored.contiguous, (stored,), "contiguous")
        return rw.constant(laid_out, f"{node.target}_contiguous")

    def _packed_once(
        self,
        make: Callable[[], torch.Tensor],
        stored: torch.Tensor,
        bits: int,
        least: int,
        apart: bool = False,
    ) -> torch.Tensor:
        return self.once(make, (stored,), "codes", bits, least, apart)


def signed_values(stored: torch.Tensor) -> torch.Tensor:
    """Return an 8-bit weight as int8; see :func:`signed_zero_point`."""
    return _moved(stored, _unsigned_shift(stored), 8)


def least_value(stored: torch.Tensor, spec: QuantSpec, bits: int) -> int:
    """Return the quantized value that is packed as 0; zero points shift by it too."""
    return first_value(stored, spec) if bits == _FOUR else _unsigned_shift(stored)


def _unsigned_shift(stored: torch.Tensor) -> int:
    return 128 if stored.dtype is torch.uint8 else 0


def _moved(stored: torch.Tensor, least: int, bits: int) -> torch.Tensor:
    """Return the quantized values of a weight in the dtype of the kernels."""
    if stored.dtype.is_floating_point:
        return stored
    dtype = torch.uint8 if bits == _FOUR else torch.int8
    if stored.dtype is dtype and least == 0:
        return stored
    return (stored.to(torch.int32) - least).to(dtype)


def _apart(stored: torch.Tensor, *, halves: bool) -> bool:
    # GLU halves of whole blocks pack the same way as no halves, so one copy serves both.
    return halves and stored.shape[0] % (2 * BLOCK) != 0


def _constant(node: Node) -> torch.Tensor:
    stored = constant_of(node)
    assert stored is not None, f"not a constant: {node.format_node()}"
    return stored


def _as_one(zeros: torch.Tensor) -> torch.Tensor | None:
    """Return a single zero point if all are equal, ``None`` if all are zero."""
    if not bool(zeros.any()):
        return None
    # Symmetric 4-bit weights have one zero point for all groups: that of code 8.
    first = zeros[:1, :1]
    return first if bool((zeros == first).all()) else zeros


def signed_zero_point(stored: torch.Tensor, params: QuantParams) -> torch.Tensor | None:
    """Return the zero points of the weight as packed to int8, ``None`` if all are zero."""
    zero = None if params.zero_point is None else constant_of(params.zero_point)
    flat = torch.zeros(1, dtype=torch.int32) if zero is None else zero.to(torch.int32).reshape(-1)
    flat = flat - _unsigned_shift(stored)
    return flat if bool(flat.any()) else None
