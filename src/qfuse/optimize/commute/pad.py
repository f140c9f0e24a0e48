"""``constant_pad_nd``: the padding value is quantized or dequantized too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch.fx.node import Argument

from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import constant_of, op_name
from qfuse.ir.ops.constants import constant_params
from qfuse.ir.ops.qdq import Dequantize, Quantize
from qfuse.ir.ops.views import QuantParams, bits_equal, node_of, shape_of, tensor_of
from qfuse.ir.quant.block import covers
from qfuse.ir.quant.reference import dequantize as dequantize_reference
from qfuse.ir.quant.reference import quantize as quantize_reference
from qfuse.ir.quant.spec import ZeroPointDomain, dtype_name
from qfuse.ir.sizes import is_row_major
from qfuse.optimize.commute.base import Commutes, Crossing, End, Work, given, lifted_work
from qfuse.optimize.match.move_qparams import QuantizedMover
from qfuse.rewrite.prelude import Miss, MissCode, Node, OpOverload, arguments, aten


@dataclass(frozen=True, slots=True)
class Pad(Commutes):
    """A padding with one finite number.

    ``quantize(pad(x, v), s)`` is ``pad(quantize(x, s), q(v))``. Refuses: parameters that are
    computed at run time, since ``q(v)`` is a number in the graph; blocks along a padded axis;
    blocks that quantize ``v`` differently; float8 storage.

    ``pad(dequantize(q, s), v)`` is ``dequantize(pad(q, c), s)``, if ``c`` represents ``v`` bit for
    bit. Refuses: several blocks; parameters that are computed at run time; a dequantize with other
    users.

    Attributes:
        node: The op.
        source: The value that is padded.
        pads: Elements before and after, from the last axis on; negative ones crop.
        value: The padding value.
    """

    ops: ClassVar[tuple[OpOverload, ...]] = (aten.constant_pad_nd.default,)

    node: Node
    source: Node
    pads: Sequence[Argument]
    value: float

    @classmethod
    def of(cls, node: Node) -> Pad | None:
        """View a padding with a finite value."""
        if not is_call(node, aten.constant_pad_nd.default):
            return None
        a = arguments(node)
        pads, number = a["pad"], a["value"]
        assert isinstance(pads, (list, tuple)), f"not a list of sizes: {node.format_node()}"
        # Its quantized value is looked up at compile time, so a symbolic number will not do.
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            return None
        return cls(node, node_of(a["self"]), pads, float(number)) if math.isfinite(number) else None

    def lift(self, quantize: Quantize) -> Crossing | Miss:
        """Quantize the operand, and pad the result with the quantized value."""
        params = quantize.params
        axis = self._split_axis(quantize)
        if axis is not None:
            text = "parameters in blocks of {} do not move above a padding of axis {}"
            details = params.spec.block_text(), axis
            return Miss(MissCode.GRANULARITY, self.node, text, *details, progress=2)
        code = _quantized(params, self.value, quantize.node)
        if isinstance(code, Miss):
            return code
        # The operand has other sizes, so a block as long as an axis is written as the whole axis.
        sizes = zip(params.spec.block, shape_of(self.node), strict=True)
        whole = tuple(None if covers(b, size) else b for b, size in sizes)
        spec, own = params.spec.with_block(whole), len(self.node.users) == 1
        return self._crossing(
            given(self.source, replace(params, spec=spec)),
            code,
            tensor_of(self.source),
            lambda: lifted_work(self.node, spec, [self.node], [self.source], goes=own),
        )

    def sink(self, operands: tuple[Dequantize, ...]) -> Crossing | Miss:
        """Pad the quantized values, and dequantize the result."""
        (dequantize,) = operands
        params = dequantize.params
        # Bit for bit: -0.0 is refused, since the zero point dequantizes to +0.0.
        code = _standing_for(params, self.value, self.node)
        if isinstance(code, Miss):
            return code
        # There is one scale, and a block as long as the old axis would not cover the padded one.
        spec = params.spec.with_block((None,) * params.spec.rank)
        end = given(self.node, replace(params, spec=spec))
        return self._crossing(end, code, tensor_of(dequantize.q))

    def _split_axis(self, quantize: Quantize) -> int | None:
        """Return an axis that is padded and has several blocks, before or after."""
        block = quantize.params.spec.block
        for index, count in enumerate(self.pads):
            axis = len(block) - 1 - index // 2
            sizes = shape_of(self.source)[axis], shape_of(self.node)[axis]
            # Padding by 1 in front of blocks of 4 shifts the data by one element against its
            # scales, and a crop may begin in the middle of a block.
            if count != 0 and not all(covers(block[axis], size) for size in sizes):
                return axis
        return None

    def _crossing(
        self, end: End, code: int, x: torch.Tensor, work: Callable[[], Work] | None = None
    ) -> Crossing | Miss:
        """Pad ``x`` (a fake tensor) with a quantized value.

        Padding a fake tensor treats its symbolic sizes as numbers, so such a result is
        built from the fake tensors that exist already.
        """
        old, args = tensor_of(self.node), (list(self.pads), code)
        fixed = all(isinstance(size, int) for size in x.shape)
        # Without known sizes, only row-major strides are known to stay as they are.
        if not fixed and not all(map(is_row_major, (x, tensor_of(self.source), old))):
            text = "{} pads a tensor of unknown size that is not row-major"
            return Miss(MissCode.SHAPE, self.node, text, op_name(self.node), progress=2)

        def apply(mover: QuantizedMover, values: Sequence[Any]) -> Iterable[Any]:
            (q,) = values
            if fixed:
                return [mover.call(self.ops[0], q, *args)]
            made = torch.empty_like(old, dtype=mover.type_of(q).dtype)
            return [mover.typed(made, self.ops[0], q, *args)]

        return Crossing((end,), apply, work)


def _known(params: QuantParams) -> tuple[torch.Tensor, torch.Tensor | None] | Miss:
    """Return scale and zero point of one level, in their shapes."""
    if params.outer_scale is not None:
        text = "its scales have a second level"
        return Miss(MissCode.GRANULARITY, params.outer_scale, text, progress=2)
    known = constant_params(params, constant_of)
    if known is None or any(value is not None and value.is_meta for value in known):
        text = "the parameters are computed at run time, and the padding is a constant"
        return Miss(MissCode.NOT_CONSTANT, params.scale, text, progress=3)
    return known


def _quantized(params: QuantParams, value: float, node: Node) -> int | Miss:
    """Return the quantized form of ``value``, which has to be the same in every block."""
    spec = params.spec
    if spec.dtype.is_floating_point:
        return Miss(MissCode.DTYPE, node, "{} cannot be padded", dtype_name(spec.dtype), progress=2)
    known = _known(params)
    if isinstance(known, Miss):
        return known
    scale, zero = known
    one_each = spec.with_block((1,) * spec.rank)
    real = torch.full(scale.shape, value, dtype=spec.float_dtype)
    # With zero points 3 and 4, 0 has two quantized
    # values, and `constant_pad_nd` pads with one number.
    codes = set(quantize_reference(real, scale, zero, one_each).flatten().tolist())
    if len(codes) != 1:
        text = "the blocks quantize the padding to {} different values"
        return Miss(MissCode.GRANULARITY, params.scale, text, len(codes), progress=3)
    return int(codes.pop())


def _standing_for(params: QuantParams, value: float, node: Node) -> int | Miss:
    """Return the quantized value that dequantizes to ``value`` bit for bit."""
    spec = params.spec
    known = _known(params)
    if isinstance(known, Miss):
        return known
    scale, zero = known
    if scale.numel() != 1:
        text = "the padding has different quantized values in different blocks"
        return Miss(MissCode.GRANULARITY, params.scale, text, progress=3)
    if not spec.dtype.is_floating_point and spec.domain is not ZeroPointDomain.FLOAT_OFFSET:
        # Only a candidate: the reference below decides, in the arithmetic of the source.
        found = (value / scale.double() + (0 if zero is None else zero.double())).item()
        code = round(found) if math.isfinite(found) else None
        if code is not None and spec.quant_min <= code <= spec.quant_max:
            stored = torch.full(scale.shape, code, dtype=spec.dtype)
            real = dequantize_reference(stored, scale, zero, spec.with_block((None,) * spec.rank))
            if bits_equal(real, torch.full(scale.shape, value, dtype=spec.float_dtype)):
                return code
    text = "no quantized value represents {}"
    return Miss(MissCode.ZERO_POINT, node, text, value, progress=3)
