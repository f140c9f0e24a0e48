"""Weights in the kernels' layout, packed once per lowering however many linears read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from qfuse.ir.program import constant_of
from qfuse.kernels import PackedGroups, pack_grouped, pack_halves, pack_weight
from qfuse.kernels.pack import BLOCK
from qfuse.kernels.pack4 import pack_weight4
from qfuse.lower.groups import first_code, group_scales, group_zero_points

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch.fx import Node

    from qfuse.ir.views import QuantParams
    from qfuse.rewrite.rewriter import Rewriter

__all__ = ["Packed", "Packed4", "Packer"]


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed weight.

    Attributes:
        weight: Signed bytes in the kernels' layout.
        sums: Per output feature, the sum of the weight less its zero point.
        zero_point: Per output feature, of the signed bytes; ``None`` if all are zero.
    """

    weight: torch.Tensor
    sums: torch.Tensor
    zero_point: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Packed4:
    """A packed weight of 4-bit codes.

    Attributes:
        weight: Codes 0 to 15, in the kernels' layout.
        scales: float32 ``[groups, N]``, rounded as the source does if it computes in less.
        zero_points: int32 ``[groups, N]``, of the codes; they may lie outside of 0 to 15.
    """

    weight: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor


@dataclass(slots=True)
class Packer:
    """Packs constants and remembers them by identity."""

    _known: dict[Hashable, Packed] = field(default_factory=dict)
    _known4: dict[Hashable, Packed4] = field(default_factory=dict)
    _known_grouped: dict[Hashable, PackedGroups] = field(default_factory=dict)
    _laid_out: dict[int, torch.Tensor] = field(default_factory=dict)

    def pack(self, node: Node, params: QuantParams, *, halves: bool = False) -> Packed:
        """Pack the constant that ``node`` names, its halves each for itself if that is asked for.

        Unsigned weights are packed as signed ones, which moves their zero point by 128.
        """
        stored = constant_of(node)
        assert stored is not None, f"not a constant: {node.format_node()}"
        zero = signed_zero_point(stored, params)
        # Halves of whole blocks are packed as without halves, so one copy serves both.
        apart = halves and stored.shape[0] % (2 * BLOCK) != 0
        key = (id(stored), None if zero is None else tuple(zero.tolist()), apart)
        if key not in self._known:
            unsigned = stored.dtype is torch.uint8
            signed = (stored.to(torch.int16) - 128).to(torch.int8) if unsigned else stored
            full = None if zero is None else zero.expand(stored.shape[0]).contiguous()
            pack = pack_halves if apart else pack_weight
            self._known[key] = Packed(*pack(signed, full), full)
        return self._known[key]

    def pack4(self, node: Node, params: QuantParams) -> Packed4:
        """Pack the constant that ``node`` names, which fits four bits: see ``fits_four_bits``.

        The least code becomes 0, which moves the zero points as far.
        """
        stored, scale = constant_of(node), constant_of(params.scale)
        assert stored is not None, f"not a constant: {node.format_node()}"
        zero = None if params.zero_point is None else constant_of(params.zero_point)
        key = (id(stored), id(scale), id(zero), str(params.spec))
        if key not in self._known4:
            least = first_code(stored, params.spec)
            codes = (stored.to(torch.int32) - least).to(torch.uint8)
            scales = group_scales(params, stored.shape)
            zeros = group_zero_points(params, stored.shape) - least
            self._known4[key] = Packed4(pack_weight4(codes), scales, zeros)
        return self._known4[key]

    def pack_grouped(
        self, node: Node, params: QuantParams, *, four: bool, halves: bool = False
    ) -> PackedGroups:
        """Pack the constant that ``node`` names for products with stored activations.

        Of four bits the least code becomes 0, unsigned bytes become signed: either moves the zero
        points as far.
        """
        stored, scale = constant_of(node), constant_of(params.scale)
        assert stored is not None, f"not a constant: {node.format_node()}"
        zero = None if params.zero_point is None else constant_of(params.zero_point)
        apart = halves and stored.shape[0] % (2 * BLOCK) != 0
        key = (id(stored), id(scale), id(zero), str(params.spec), four, apart)
        if key not in self._known_grouped:
            unsigned = stored.dtype is torch.uint8
            least = first_code(stored, params.spec) if four else 128 * unsigned
            codes = (stored.to(torch.int32) - least).to(torch.uint8 if four else torch.int8)
            scales = group_scales(params, stored.shape).t()
            zeros = (group_zero_points(params, stored.shape) - least).t()
            self._known_grouped[key] = pack_grouped(codes, scales, _as_one(zeros), halves=apart)
        return self._known_grouped[key]

    def contiguous(self, node: Node, rw: Rewriter) -> Node:
        """Return a weight with its elements in order; a constant is laid out now."""
        stored = constant_of(node)
        if stored is None:
            return rw.call(torch.ops.aten.contiguous.default, node)
        if stored.is_contiguous():
            return node
        if id(stored) not in self._laid_out:
            self._laid_out[id(stored)] = stored.contiguous()
        return rw.constant(self._laid_out[id(stored)], f"{node.target}_contiguous")


def _as_one(zeros: torch.Tensor) -> torch.Tensor | None:
    """Return one zero point where all are equal, ``None`` where all are zero."""
    if not bool(zeros.any()):
        return None
    first = zeros[:1, :1]
    return first if bool((zeros == first).all()) else zeros


def signed_zero_point(stored: torch.Tensor, params: QuantParams) -> torch.Tensor | None:
    """Return the zero points of the weight as signed bytes, ``None`` if all are zero."""
    zero = None if params.zero_point is None else constant_of(params.zero_point)
    flat = torch.zeros(1, dtype=torch.int32) if zero is None else zero.to(torch.int32).reshape(-1)
    if stored.dtype is torch.uint8:
        flat = flat - 128
    return flat if bool(flat.any()) else None
