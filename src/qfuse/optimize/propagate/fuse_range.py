"""A clamp of what an op stores is the range of that op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.declare import Op
from qfuse.ir.ops.views import node_of, tensor_of
from qfuse.ir.quant.spec import QuantSpec, dtype_name, dtype_range
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
    """A clamp, the op that stores what it reads, and the range of the two."""

    node: Node
    stores: Op
    spec: QuantSpec


class FuseRange(Rule[FuseRangeSite]):
    """``clamp(quantize(x), a, b)`` becomes a quantize to what the two ranges have in common.

    Before::

        x -> quantize to [-128, 127] -> clamp(3, 200) -> ...

    After::

        x -> quantize to [3, 127] -> ...

    The same holds for ``requantize`` and for a fused linear that stores its result. Two quantizes
    with one scale and one zero point become one in this way, and only those.

    Refuses: bounds that are no integers; an op that others read too; stored floats.
    """

    name = "fuse-range"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.clamp.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> FuseRangeSite | Miss:
        """Match a clamp of what one op stores."""
        a = arguments(node)
        source = node_of(a["self"])
        stores = ops.as_op(source)
        params = None if stores is None else stores.result_params
        if stores is None or params is None:
            return Miss(MissCode.PATTERN, node, "it does not clamp stored numbers", progress=0)
        bounds = [a["min"], a["max"]]
        least, most = dtype_range(params.spec.dtype)
        integers = all(b is None or (type(b) is int and least <= b <= most) for b in bounds)
        if params.spec.dtype.is_floating_point or not integers:
            text = "its bounds are no integers of {}"
            told = dtype_name(params.spec.dtype)
            return Miss(MissCode.ARGUMENT, node, text, told, progress=2)
        for user in source.users:
            if user is not node:
                text = "what it clamps is also read by {}"
                return Miss(MissCode.SHARED, source, text, op_name(user), progress=2)
        spec = params.spec
        low, high = (_cut(code, bounds) for code in (spec.quant_min, spec.quant_max))
        wrong = refuse_layout(node, tensor_of(source), moves=False)
        return wrong or FuseRangeSite(node, stores, replace(spec, quant_min=low, quant_max=high))

    def rewrite(self, site: FuseRangeSite, rw: Rewriter) -> None:
        """Store to the smaller range at once."""
        params = site.stores.result_params
        assert params is not None, "the site stores numbers"
        made = site.stores.with_result_params(replace(params, spec=site.spec))
        kept = tensor_of(site.stores.node)
        rw.replace(site.node, rw.replay(made.overload, made.call_args(), {}, kept))


def _cut(code: int, bounds: Sequence[object]) -> int:
    """Cut one number off as torch does: the upper bound last."""
    low, high = bounds
    if isinstance(low, int):
        code = max(code, low)
    return min(code, high) if isinstance(high, int) else code
