"""Weights in the kernels' layout, packed once per lowering however many linears read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from qfuse.ir.program import constant_of
from qfuse.kernels import pack_halves, pack_weight
from qfuse.kernels.pack import BLOCK

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch.fx import Node

    from qfuse.ir.views import QuantParams
    from qfuse.rewrite.rewriter import Rewriter

__all__ = ["Packed", "Packer"]


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


@dataclass(slots=True)
class Packer:
    """Packs constants and remembers them by identity."""

    _known: dict[Hashable, Packed] = field(default_factory=dict)
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


def signed_zero_point(stored: torch.Tensor, params: QuantParams) -> torch.Tensor | None:
    """Return the zero points of the weight as signed bytes, ``None`` if all are zero."""
    zero = None if params.zero_point is None else constant_of(params.zero_point)
    flat = torch.zeros(1, dtype=torch.int32) if zero is None else zero.to(torch.int32).reshape(-1)
    if stored.dtype is torch.uint8:
        flat = flat - 128
    return flat if bool(flat.any()) else None
