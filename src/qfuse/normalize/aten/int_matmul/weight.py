"""The weight of a scaled product: its quantized values and parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx.node import Argument

from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.spec import QuantSpec, dtype_name
from qfuse.normalize.aten.qdq.scale_factor import (
    Factor,
    check_range,
    chosen_at_run_time,
    constant_factor,
    zero_factor,
)
from qfuse.normalize.match.broadcast import Broadcast, broadcast_of
from qfuse.normalize.match.constants import derived, is_unit, unit_scale
from qfuse.normalize.match.quantized_values import (
    full_range_spec,
    moved_constant,
    quantized_values,
)
from qfuse.rewrite.pattern.base import is_tensor
from qfuse.rewrite.prelude import Miss, MissCode, Node, Rewriter


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight, dequantized or not.

    Attributes:
        node: The matrix ``[N, K]`` of a linear; ``None`` if it has to be built.
        q: Its quantized values; ``None`` if it is a float matrix.
        rows: Whether their shape is ``[N, K]``; otherwise it is ``[K, N]``.
        scale: Of shape ``[N, 1]`` or ``[1, 1]``; ``None`` is 1.
        zero: The zero point, or the subtrahend of values that are not dequantized yet.
        spec: The spec of its dequantize; ``None`` if it is not dequantized yet.
    """

    node: Node | None
    q: Node | None = None
    rows: bool = True
    scale: Node | Factor | None = None
    zero: Argument | Factor = None
    spec: QuantSpec | None = None

    @staticmethod
    def of(node: Node) -> Weight:
        """View the weight of a linear."""
        found = as_dequantize(node)
        if found is not None:
            params = found.params
            zero = params.zero_point
            return Weight(node, found.q, scale=params.scale, zero=zero, spec=params.spec)
        stored = quantized_values(node)
        # The quantized values must be the matrix itself, so that its rows are those of the scale.
        if stored is None or stored.views or moved_constant(stored.q) is None:
            return Weight(node)
        return Weight(node, stored.q, zero=stored.zero)

    @property
    def is_scaled(self) -> bool:
        """Whether there is a scale other than 1."""
        if isinstance(self.scale, Factor):
            value = self.scale.value
            return value is None or value.numel() != 1 or value.item() != 1
        return self.scale is not None and not is_unit(self.scale)

    @property
    def is_open(self) -> bool:
        """Whether a scale can be added to it."""
        if self.q is None or self.spec is None:
            return self.q is not None
        return not self.is_scaled and self.spec.is_plain and constant_of(self.q) is not None

    def dequantized(self, float_dtype: torch.dtype) -> Weight:
        """Return the weight with the scale 1."""
        if self.spec is not None or self.q is None:
            return self
        return replace(self, node=None, spec=full_range_spec(self.q, (None, None), float_dtype))

    def scaled(self, at: Node, scale: Factor, float_dtype: torch.dtype) -> Weight | Miss:
        """Return the weight with a scale."""
        assert self.q is not None, "only quantized weights take a scale"
        # One scale per output feature is one per row of `[N, K]`.
        block = (None if scale.shape[0] == 1 else 1, None)
        if self.spec is not None:
            # Its scale is 1 so far (`is_open`), so the new one replaces it and may have another
            # block.
            if self.zero is None:
                return replace(self, node=None, scale=scale, spec=self.spec.with_block(block))
            text = "the weight has a zero point of one block, the scale another"
            return Miss(MissCode.ZERO_POINT, at, text)
        assert not isinstance(self.zero, Factor), "it is not dequantized yet"
        zero = _zero(at, self.q, self.zero, scale)
        if isinstance(zero, Miss):
            return zero
        return replace(
            self,
            node=None,
            scale=scale,
            zero=zero,
            spec=full_range_spec(self.q, block, float_dtype),
        )

    def range_refusal(self, at: Node) -> Miss | None:
        """Refuse a scale that takes the weight out of the normal range."""
        assert isinstance(self.scale, Factor), "it was scaled"
        assert self.scale.value is not None, "by a constant"
        assert self.spec is not None, "and is dequantized"
        return check_range(at, self.scale.value, self.spec, shifted=self.zero is not None)

    def build(self, rw: Rewriter) -> Node:
        """Return the weight as the operand of a linear."""
        if self.node is not None:
            return self.node
        q = self.q
        assert q is not None, "it has quantized values"
        if not self.rows:
            # The transpose of a constant is another constant with the same memory.
            moved = moved_constant(q)
            assert moved is not None, "the weight is a constant"
            q = derived(rw, q, moved[1].t(), "t")
        zero = self.zero.build(rw) if isinstance(self.zero, Factor) else self.zero
        if isinstance(self.scale, Factor):
            scale = self.scale.build(rw)
        else:
            scale = self.scale or unit_scale(rw, q, 2)
        return rw.call(ops.dequantize, q, scale, zero, str(self.spec))


def read_scale(at: Node, by: Argument, y: Node, compute: torch.dtype) -> Factor | Miss:
    """View the factor of ``y``, a product, as the scale of its weight."""
    if isinstance(by, (int, float)):
        return constant_factor(at, torch.full((1, 1), float(by), dtype=compute), 2, "scale")
    if not isinstance(by, Node) or not is_tensor(by):
        return Miss(MissCode.DTYPE, at, "the factor is not a tensor")
    # A factor per row of the result belongs to a row of the activation, and to no row of the
    # weight.
    if broadcast_of(shape_of(by), shape_of(y)) in {None, Broadcast.ROWS}:
        text = "a factor of shape {} on a result of shape {} is not one number per output feature"
        return Miss(MissCode.AXIS, by, text, tuple(shape_of(by)), tuple(shape_of(y)))
    known = constant_value(by)
    if known is None:
        return Miss(MissCode.NOT_CONSTANT, by, "the factor is computed at run time")
    if not known.dtype.is_floating_point:
        # An integer factor is promoted to the dtype of the product.
        known = known.to(compute)
    return constant_factor(by, known.reshape(-1, 1), 2, "scale")


def _zero(at: Node, q: Node, zero: Argument, scale: Factor) -> Factor | Miss | None:
    if zero is None:
        return None
    dtype = dtype_of(q)
    if dtype.is_floating_point:
        text = "{} values have no zero point"
        return Miss(MissCode.ZERO_POINT, at, text, dtype_name(dtype))
    factor = zero_factor(at, zero, scale.shape, dtype)
    if isinstance(factor, Factor) and factor.value is None and not chosen_at_run_time(factor.home):
        text = "the zero point is not a constant, and no op that chooses zero points returned it"
        return Miss(MissCode.NOT_CONSTANT, factor.home, text)
    return factor
