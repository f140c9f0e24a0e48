"""Fuse a clamp of quantized values into the op that computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.declare import Op
from qfuse.ir.ops.views import node_of, tensor_of
from qfuse.ir.quant.spec import QuantSpec, ZeroPointDomain, dtype_name, dtype_range
from qfuse.optimize.match.strides import refuse_layout
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    arguments,
    aten,
)


@dataclass(frozen=True, slots=True)
class FuseRangeSite:
    """A clamp, the op that computes its operand, and the intersection of both ranges."""

    node: Node
    stores: Op
    spec: QuantSpec


class FuseRange(Rule[FuseRangeSite]):
    """``clamp(quantize(x), a, b)`` becomes a quantize to the intersection of the two ranges.

    Before::

        x -> quantize to [-128, 127] -> clamp(3, 200) -> ...

    After::

        x -> quantize to [3, 127] -> ...

    The same holds for ``requantize`` and for a fused linear with a quantized output. Two
    quantizes that share scale and zero point also become one this way.

    Refuses: bounds that are not integers; float offsets, which count from the middle of the range;
    an op with other users; float8 storage.
    """

    name = "fuse-range"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.clamp.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> FuseRangeSite | Miss:
        """Match a clamp of the quantized result of one op."""
        a = arguments(node)
        source = node_of(a["self"])
        stores = ops.as_op(source)
        params = None if stores is None else stores.result_params
        if stores is None or params is None:
            return Miss(MissCode.PATTERN, node, "it does not clamp quantized values", progress=0)
        bounds = [a["min"], a["max"]]
        # In a clamp of uint8, torch takes a bound of -1 for 255.
        least, most = dtype_range(params.spec.dtype)
        integers = all(b is None or (type(b) is int and least <= b <= most) for b in bounds)
        if params.spec.dtype.is_floating_point or not integers:
            text = "its bounds are not integers of {}"
            details = dtype_name(params.spec.dtype)
            return Miss(MissCode.ARGUMENT, node, text, details, progress=2)
        if params.spec.domain is ZeroPointDomain.FLOAT_OFFSET:
            # Another range has another middle, and the offset counts from the middle.
            text = "the zero point of its operand is a float offset"
            return Miss(MissCode.ZERO_POINT, source, text, progress=2)
        # The other users still need the values outside of the smaller range.
        for user in source.users:
            if user is not node:
                text = "its operand is also used by {}"
                return Miss(MissCode.SHARED, source, text, op_name(user), progress=2)
        spec = params.spec
        # Both ends are clamped, so bounds outside of the range leave a range of one value: clamp(3,
        # 5) of [10, 20] is [5, 5], as in torch.
        low, high = (_cut(code, bounds) for code in (spec.quant_min, spec.quant_max))
        wrong = refuse_layout(node, tensor_of(source), moves=False)
        return wrong or FuseRangeSite(node, stores, replace(spec, quant_min=low, quant_max=high))

    def rewrite(self, site: FuseRangeSite, rw: Rewriter) -> None:
        """Quantize to the smaller range."""
        params = site.stores.result_params
        assert params is not None, "the site has a quantized output"
        made = site.stores.with_result_params(replace(params, spec=site.spec))
        # The strides are those of the op, not those of
        # the clamp, which `refuse_layout` has compared.
        kept = tensor_of(site.stores.node)
        rw.replace(site.node, rw.replay(made.overload, made.call_args(), {}, kept))


def _cut(code: int, bounds: Sequence[object]) -> int:
    """Clamp one number as torch does: the upper bound last."""
    low, high = bounds
    if isinstance(low, int):
        code = max(code, low)
    return min(code, high) if isinstance(high, int) else code
