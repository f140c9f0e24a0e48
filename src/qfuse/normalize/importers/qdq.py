"""Shared code of the rules for quantize and dequantize ops: their site, edit and checks."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import COMPUTE_DTYPES, exact_integers
from qfuse.ir.ops.value_range import Bounds, bounds_of, is_zero
from qfuse.ir.ops.views import dtype_of
from qfuse.ir.quant.spec import (
    STORAGE_DTYPES,
    Arithmetic,
    Block,
    QuantSpec,
    dtype_name,
    dtype_range,
)
from qfuse.normalize.importers.errors import cannot_run
from qfuse.normalize.importers.rule import RefusedError, SourceRule, promoted
from qfuse.rewrite.prelude import MissCode, Node, OpOverload, Rewriter

# What quantizers store; float16 is a cast, not a quantize.
_SOURCE_STORAGE = tuple(dtype for dtype in STORAGE_DTYPES if dtype is not torch.float16)
_DECOMPOSED_STORAGE = (*_SOURCE_STORAGE, torch.uint16)


class Recipe(Protocol):
    """How to build the node of a scale or zero point."""

    def build(self, rw: Rewriter, hint: str) -> Node:
        """Build the node; ``hint`` names it if it is new."""


@dataclass(frozen=True, slots=True)
class QdqSite:
    """A source op that quantizes or dequantizes, in canonical terms.

    Attributes:
        node: The source op.
        value: Its operand: float values for a quantize, quantized values for a dequantize.
        scale: Its scale.
        zero_point: Its zero point, if it has a nonzero one.
        spec: The rest of the encoding.
    """

    node: Node
    value: Node
    scale: Recipe
    zero_point: Recipe | None
    spec: QuantSpec


class QdqRule(SourceRule[QdqSite], ABC):
    """Replaces a source op by one canonical op.

    Attributes:
        op: ``qfuse.quantize`` or ``qfuse.dequantize``.
    """

    op: ClassVar[OpOverload]

    def rewrite(self, site: QdqSite, rw: Rewriter) -> None:
        """Build the parameters, then the canonical op."""
        name = site.node.name
        scale = site.scale.build(rw, f"{name}_scale")
        zero = None
        if site.zero_point is not None:
            zero = site.zero_point.build(rw, f"{name}_zero_point")
        # The canonical op computes the same value as the source op, so its type need not be
        # inferred.
        args = (site.value, scale, zero, str(site.spec))
        rw.replace(site.node, rw.replay(self.op, args, {}, site.node.meta["val"]))


def quant_range(node: Node, low: Argument, high: Argument) -> Bounds:
    """Return the range of quantized values that a source op names.

    Raises:
        RefusedError: It is not a pair of integers that are known at compile time.
    """
    ends = []
    for name, value in (("least", low), ("greatest", high)):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            text = "the {} quantized value is not known before run time"
            raise RefusedError(MissCode.NOT_CONSTANT, node, text, name)
        if value != int(value):
            text = "the {} quantized value is not an integer: {}"
            raise RefusedError(MissCode.RANGE, node, text, name, value)
        ends.append(int(value))
    return ends[0], ends[1]


def make_spec(
    node: Node,
    storage: tuple[torch.dtype, Bounds],
    block: Block,
    float_dtype: torch.dtype,
    arithmetic: Arithmetic,
) -> QuantSpec:
    """Return the spec of a quantize or dequantize.

    Raises:
        RefusedError: A canonical spec cannot express it.
    """
    dtype, codes = storage
    if dtype not in _SOURCE_STORAGE:
        text = "{} is not a storage type"
        raise RefusedError(MissCode.DTYPE, node, text, dtype_name(dtype))
    low, high = dtype_range(dtype)
    if not low <= codes[0] <= codes[1] <= high:
        text = "its range [{}, {}] does not fit in {}"
        raise RefusedError(MissCode.RANGE, node, text, *codes, dtype_name(dtype))
    for name, kind in (("real side", float_dtype), ("arithmetic", arithmetic.compute)):
        if kind not in COMPUTE_DTYPES:
            text = "its {} is {}, which canonical ops do not support"
            raise RefusedError(MissCode.DTYPE, node, text, name, dtype_name(kind))
    return QuantSpec(dtype, *codes, block, float_dtype, arithmetic)


def check_quant_range(node: Node, dtype: torch.dtype, codes: Bounds) -> None:
    """Check a range as an op of the ``quantized_decomposed`` namespace does at run time.

    Raises:
        NormalizeError: The op does not support the dtype, or the range exceeds it.
    """
    if dtype not in _DECOMPOSED_STORAGE:
        raise cannot_run(node, f"it does not store {dtype_name(dtype)}")
    low, high = dtype_range(dtype)
    if codes[0] < low or codes[1] > high:
        what = f"the range {list(codes)} exceeds {dtype_name(dtype)} [{low}, {high}]"
        raise cannot_run(node, what)


def check_operand_dtype(node: Node, q: Node, dtype: torch.dtype) -> None:
    """Check that a dequantize names the dtype of its operand, as its op does at run time.

    Raises:
        NormalizeError: It names another dtype.
    """
    if dtype_of(q) != dtype:
        given = dtype_name(dtype_of(q))
        raise cannot_run(node, f"a dequantize of {dtype_name(dtype)} is given {given}")


def check_rounds_nothing(node: Node, dtype: torch.dtype) -> None:
    """Check that a quantize that rounds to integers does not store a float dtype.

    Raises:
        RefusedError: It does; the canonical op rounds to the float dtype, not to integers.
    """
    if dtype.is_floating_point:
        text = "it rounds to integers before {}, which canonical ops do not support"
        raise RefusedError(MissCode.ARITHMETIC, node, text, dtype_name(dtype))


def check_clamp(node: Node, spec: QuantSpec) -> None:
    """Check that a quantize's bounds are exact in the dtype in which it clamps.

    Any other bound is rounded out of the storage dtype, and converting a value out of range is
    undefined: it differs between kernels.

    Raises:
        RefusedError: They are not.
    """
    compute = spec.arithmetic.compute
    if spec.dtype.is_floating_point:
        return
    # bfloat16 rounds 127 to 127 but 255 to 256, which is no uint8.
    for code in (spec.quant_min, spec.quant_max):
        if torch.tensor(code, dtype=torch.float64).to(compute).item() != code:
            text = "its bound {} is not exact in {}, in which it clamps"
            raise RefusedError(MissCode.ARITHMETIC, node, text, code, dtype_name(compute))


def check_zero_point_dtype(zero_point: Node, compute: torch.dtype) -> None:
    """Check that a zero point does not promote the source's arithmetic beyond ``compute``.

    Raises:
        RefusedError: It does.
    """
    dtype = dtype_of(zero_point)
    # A float64 zero point would lift the whole source expression to float64.
    if promoted(zero_point, compute, dtype) != compute:
        text = "the zero point is {}, so the source computes in a dtype other than {}"
        raise RefusedError(MissCode.DTYPE, zero_point, text, dtype_name(dtype), dtype_name(compute))


def check_subtraction(q: Node, zero_point: Node | None, compute: torch.dtype) -> None:
    """Check a dequantize that computes ``q - zero_point`` in the common dtype of the two.

    It subtracts before it converts to the dtype of the scale; the canonical op converts first. An
    integer dtype that is too narrow wraps, and a float dtype rounds.

    Raises:
        RefusedError: The two orders may differ.
    """
    if zero_point is None:
        return
    check_zero_point_dtype(zero_point, compute)
    taken = promoted(q, dtype_of(q), dtype_of(zero_point))
    # Computed in one dtype, both orders are the same. Subtracting a zero in integers cannot wrap.
    if taken == compute or (is_zero(zero_point) and not taken.is_floating_point):
        return
    if not all(exact_difference(q, zero_point, within) for within in (taken, compute)):
        text = "it subtracts the zero point in {} and multiplies in {}, which may not be exact"
        raise RefusedError(
            MissCode.ARITHMETIC, zero_point, text, dtype_name(taken), dtype_name(compute)
        )


def exact_difference(q: Node, zero_point: Node | int, within: torch.dtype) -> bool:
    """Whether ``q``, ``zero_point`` and ``q - zero_point`` are always exact in ``within``."""
    low, high = exact_integers(within)
    # Dtypes decide nearly always; comparing values costs reading them.
    for look in (False, True):
        stored = bounds_of(q, look=look)
        zero: Bounds | None
        if isinstance(zero_point, int):
            zero = (zero_point, zero_point)
        else:
            zero = bounds_of(zero_point, look=look)
        if stored is None or zero is None:
            continue
        ends = (*stored, *zero, stored[0] - zero[1], stored[1] - zero[0])
        if low <= min(ends) and max(ends) <= high:
            return True
    return False
