"""Clamps: activations that clip at two bounds, either of which may be infinite."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.fx.node import Argument

from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import Dequantize, Quantize
from qfuse.ir.ops.views import QuantParams, bits_equal, dtype_of, node_of
from qfuse.ir.quant.reference import quantize as quantize_reference
from qfuse.ir.quant.spec import QuantSpec, ZeroPointDomain
from qfuse.optimize.commute.base import Commutes, Crossing, given, vanishes
from qfuse.optimize.match.dequant_table import known_params, table_of
from qfuse.rewrite.prelude import Miss, MissCode, Node, OpOverload, arguments, aten


@dataclass(frozen=True, slots=True)
class Clamp(Commutes):
    """A clamp with constant bounds that keeps the dtype.

    ``quantize(clamp(x, a, b))`` is a quantize of ``x`` to ``[q(a), q(b)]``. Quantization is
    monotonic, so clamping before it and clamping after it, at the quantized bounds, are the same.
    ReLU is a clamp at zero, which is stored as the zero point. Refuses: a clamp with other users;
    parameters that are computed at run time, since the range is in the graph; blocks that quantize
    a bound differently; scales that reverse the order; float8 storage.

    ``clamp(dequantize(q))`` is ``dequantize(clamp(q, c, d))``. It is proved by checking all
    quantized values of all blocks; where none is clipped, the clamp is dropped. Refuses: a bound
    that no quantized value represents, or that differs between blocks; parameters that are computed
    at run time; a dequantize with other users; storage with too many values.

    Attributes:
        node: The op.
        source: The value that is clamped.
        rest: The other arguments.
    """

    ops: ClassVar[tuple[OpOverload, ...]] = (
        aten.relu.default,
        aten.relu6.default,
        aten.hardtanh.default,
        aten.clamp.default,
        aten.clamp_min.default,
        aten.clamp_max.default,
    )

    node: Node
    source: Node
    rest: tuple[Argument, ...]

    @classmethod
    def of(cls, node: Node) -> Clamp | None:
        """View a clamp with constant bounds that keeps the dtype."""
        if not is_call(node, *cls.ops):
            return None
        a = arguments(node)
        rest = tuple(v for name, v in a.items() if name != "self")
        x, dtype = node_of(a["self"]), dtype_of(node)
        # A float bound promotes an integer operand, so the op is a cast as well.
        if not dtype.is_floating_point or dtype_of(x) != dtype:
            return None
        most = torch.finfo(dtype).max
        return cls(node, x, rest) if all(_is_bound(v, most) for v in rest) else None

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Clamp tensors as the op does, including its rounding of bounds and its NaN."""
        op = overload_of(self.node)
        assert op is not None, f"not a call of an op: {self.node.format_node()}"
        with torch.no_grad():
            cut: torch.Tensor = op(values, *self.rest)
        return cut

    def lift(self, quantize: Quantize) -> Crossing | Miss:
        """Quantize the operand of the clamp, to the smaller range."""
        # Any other user keeps the clamp, and then crossing it saves nothing.
        for user in self.node.users:
            if not is_call(user, ops.quantize):
                text = "the clamp is also used by {}"
                return Miss(MissCode.SHARED, self.node, text, op_name(user), progress=2)
        params = quantize.params
        codes = self._range(params)
        if isinstance(codes, Miss):
            return codes
        spec = replace(params.spec, quant_min=codes[0], quant_max=codes[1])
        return Crossing((given(self.source, replace(params, spec=spec)),))

    def sink(self, operands: tuple[Dequantize, ...]) -> Crossing | Miss:
        """Clamp the quantized values, and dequantize the result."""
        (dequantize,) = operands
        bounds = self._bounds(dequantize.params)
        if isinstance(bounds, Miss):
            return bounds
        end = (given(self.node, dequantize.params),)
        if bounds == (None, None):
            return Crossing(end)
        return Crossing(end, lambda mover, q: [mover.call(aten.clamp.default, q[0], *bounds)])

    def shares_with(self, user: Node) -> bool:
        """Any user may stay if no dequantize remains below."""
        del user
        return vanishes(self.node)

    def _range(self, params: QuantParams) -> tuple[int, int] | Miss:
        """Return the quantized bounds, which have to be the same in all blocks."""
        spec = params.spec
        # A float offset counts from the middle of the range, so the same quantized values in
        # another range stand for other numbers.
        offset = spec.domain is ZeroPointDomain.FLOAT_OFFSET
        if spec.dtype.is_floating_point or offset or not spec.is_plain:
            text = "a clamp cannot become a range of {}"
            return Miss(MissCode.DTYPE, self.node, text, spec, progress=2)
        known = known_params(params)
        if isinstance(known, Miss):
            return known
        scale, zero = (None if value is None else value.reshape(1, -1) for value in known)
        assert scale is not None, "a quantize has a scale"
        # A scale of -0.1 swaps the bounds; one of 1e-39 has
        # an infinite reciprocal, and 0 times it is NaN.
        if scale.numel() == 0 or not _keeps_order(scale, zero, spec):
            text = "its scale or zero point does not keep the order of values"
            return Miss(MissCode.RANGE, params.scale, text, progress=3)
        # Clamping infinities returns the bounds, rounded as the op rounds them.
        ends = torch.tensor([-torch.inf, torch.inf], dtype=spec.float_dtype, device=scale.device)
        cut = self(ends)[:, None].expand(2, scale.numel())
        codes = quantize_reference(cut, scale, zero, spec.with_block((None, 1)))
        # A spec has one range for all blocks: ReLU over zero points 3 and 4 would need two.
        if not bool((codes == codes[:, :1]).all()):
            text = "the blocks quantize the bounds of {} to different values"
            details = op_name(self.node)
            return Miss(MissCode.GRANULARITY, params.scale, text, details, progress=3)
        low, high = codes[:, 0].tolist()
        return low, high

    def _bounds(self, params: QuantParams) -> tuple[int | None, int | None] | Miss:
        """Return the smallest and the largest quantized value that remain; ``None`` if all do."""
        # At scale 0.11 no quantized value stands for the 6 of relu6: 54 is 5.94, and 55 is 6.05.
        # Whether one does is looked up and not computed.
        table = table_of(params)
        if isinstance(table, Miss):
            return table
        cut = self(table.float_values)
        codes = torch.arange(table.low, table.high + 1, device=cut.device)
        # Values that the clamp keeps are the new range; clamping to it must have the op's result
        # bit for bit, for all quantized values of all blocks.
        kept = codes[(cut == table.float_values).all(1)]
        if kept.numel():
            low, high = int(kept[0]), int(kept[-1])
            if bits_equal(table.float_values[codes.clamp(low, high) - table.low], cut):
                # A bound that is the end of the dtype clips
                # nothing; without both, the op is dropped.
                return None if low == table.low else low, None if high == table.high else high
        text = "no quantized value represents a bound of {} in all blocks"
        return Miss(MissCode.ZERO_POINT, self.node, text, op_name(self.node), progress=3)


def _is_bound(value: Argument, most: float) -> bool:
    """Whether ``value`` is a bound of a dtype with largest finite value ``most``, or absent."""
    if value is None:
        return True
    # NaN is neither, and makes every result of torch's clamp NaN.
    return isinstance(value, (int, float)) and (abs(value) <= most or math.isinf(value))


def _keeps_order(scale: torch.Tensor, zero: torch.Tensor | None, spec: QuantSpec) -> bool:
    """Whether all multipliers and offsets are positive and finite, so that order is kept."""
    # What matters is the number that is multiplied, in the dtype of the arithmetic.
    factor = scale.reciprocal() if spec.arithmetic.reciprocal else scale
    factor = factor.to(spec.arithmetic.compute)
    usual = bool(((factor > 0) & factor.isfinite()).all())
    return usual and (zero is None or bool(zero.to(spec.arithmetic.compute).isfinite().all()))
