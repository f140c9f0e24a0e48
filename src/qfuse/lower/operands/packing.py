"""Weights in the kernels' layout, packed once per lowering however many linears read them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.views import QuantParams
from qfuse.ir.quant.spec import QuantSpec
from qfuse.kernels import PackedGroups, pack_bytes, pack_grouped, pack_weight4, weight_sums
from qfuse.kernels.pack import BLOCK
from qfuse.lower.operands.groups import first_code, group_scales, group_zero_points
from qfuse.rewrite.prelude import Node, Rewriter

Made = TypeVar("Made")

_FOUR = 4


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
    """Packs constants and remembers them by identity, for all rows of a lowering."""

    _known: dict[Hashable, tuple[tuple[torch.Tensor | None, ...], Any]] = field(
        default_factory=dict
    )

    def once(
        self, make: Callable[[], Made], tensors: Sequence[torch.Tensor | None], *rest: Hashable
    ) -> Made:
        """Return what ``make`` gave for these tensors and ``rest`` before, or make it now.

        The tensors are kept: the identity of one that is gone may be that of another.
        """
        key = (*map(id, tensors), *rest)
        if key not in self._known:
            self._known[key] = tuple(tensors), make()
        made: Made = self._known[key][1]
        return made

    def codes(self, stored: torch.Tensor, spec: QuantSpec, bits: int) -> torch.Tensor:
        """Pack the codes of a weight, which of four bits fit them: see ``fits_four_bits``.

        Codes are stored numbers less ``least_code``, whatever type those have.
        """
        least = least_code(stored, spec, bits)
        pack = pack_weight4 if bits == _FOUR else pack_bytes
        return self._codes(lambda: pack(_moved(stored, least, bits)), stored, bits, least)

    def pack(self, node: Node, params: QuantParams, *, halves: bool = False) -> Packed:
        """Pack the constant that ``node`` names, its halves each for itself if that is asked for.

        Unsigned weights are packed as signed ones, which moves their zero point by 128.
        """
        stored = _constant(node)
        zero = signed_zero_point(stored, params)
        apart = _apart(stored, halves=halves)

        def packed() -> Packed:
            least = least_code(stored, params.spec, 8)
            signed = _moved(stored, least, 8)
            full = None if zero is None else zero.expand(stored.shape[0]).contiguous()
            codes = self._codes(lambda: pack_bytes(signed, halves=apart), stored, 8, least, apart)
            return Packed(codes, weight_sums(signed, full), full)

        numbers = None if zero is None else tuple(zero.tolist())
        return self.once(packed, (stored,), "rows", numbers, apart)

    def pack_grouped(
        self, node: Node, params: QuantParams, *, four: bool, halves: bool = False
    ) -> PackedGroups:
        """Pack the constant that ``node`` names for products with stored activations.

        Of four bits the least code becomes 0, unsigned bytes become signed: either moves the zero
        points as far.
        """
        stored, bits = _constant(node), _FOUR if four else 8
        apart = _apart(stored, halves=halves)

        def packed() -> PackedGroups:
            least = least_code(stored, params.spec, bits)
            scales = group_scales(params, stored.shape).t()
            zeros = (group_zero_points(params, stored.shape) - least).t()
            codes = _moved(stored, least, bits)
            made = pack_grouped(codes, scales, _as_one(zeros), halves=apart)
            # Other rows may have packed the same codes.
            weight = self._codes(lambda: made.weight, stored, bits, least, apart)
            return made._replace(weight=weight)

        tensors = (stored, *map(constant_of, params.tensors))
        return self.once(packed, tensors, "groups", str(params.spec), bits, apart)

    def contiguous(self, node: Node, rw: Rewriter) -> Node:
        """Return a weight with its elements in order; a constant is laid out now."""
        stored = constant_of(node)
        if stored is None:
            return rw.call(torch.ops.aten.contiguous.default, node)
        if stored.is_contiguous():
            return node
        laid_out = self.once(stored.contiguous, (stored,), "contiguous")
        return rw.constant(laid_out, f"{node.target}_contiguous")

    def _codes(
        self,
        make: Callable[[], torch.Tensor],
        stored: torch.Tensor,
        bits: int,
        least: int,
        apart: bool = False,
    ) -> torch.Tensor:
        return self.once(make, (stored,), "codes", bits, least, apart)


def least_code(stored: torch.Tensor, spec: QuantSpec, bits: int) -> int:
    """Return the stored number that becomes code 0, by which zero points move too."""
    return first_code(stored, spec) if bits == _FOUR else 128 * (stored.dtype is torch.uint8)


def _moved(stored: torch.Tensor, least: int, bits: int) -> torch.Tensor:
    """Return the codes of a weight in the type that kernels know them by."""
    dtype = torch.uint8 if bits == _FOUR else torch.int8
    if stored.dtype is dtype and least == 0:
        return stored
    return (stored.to(torch.int32) - least).to(dtype)


def _apart(stored: torch.Tensor, *, halves: bool) -> bool:
    # Halves of whole blocks are packed as without halves, so one copy serves both.
    return halves and stored.shape[0] % (2 * BLOCK) != 0


def _constant(node: Node) -> torch.Tensor:
    stored = constant_of(node)
    assert stored is not None, f"not a constant: {node.format_node()}"
    return stored


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
