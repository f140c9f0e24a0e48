"""Fuse a leaky ReLU with slopes per channel into the epilogue of a fused product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.memory_formats import CHANNELS
from qfuse.ir.ops.epilogue import Prelu
from qfuse.ir.ops.product import FusedProduct
from qfuse.ir.ops.views import dtype_of, node_of, shape_of
from qfuse.ir.sizes import Size
from qfuse.optimize.fuse.epilogue import append_op, open_product
from qfuse.optimize.fuse.epilogue_operand import refuse_shape
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
class PreluSite:
    """A fused op, the PReLU that is its only user, and its slopes in a shape that broadcasts."""

    fused: FusedProduct
    node: Node
    slopes: Node
    shape: tuple[Size, ...]


class FusePrelu(Rule[PreluSite]):
    """``prelu(qfuse.convolution(...), slopes)`` becomes one op with the slopes as epilogue operand.

    The same for ``qfuse.linear`` and ``qfuse.matmul``. Constant slopes are reshaped at compile
    time. A single constant slope is a leaky ReLU after normalizing.

    Refuses: an op with other users; slopes along another axis than the channels or features, or of
    another dtype.
    """

    name = "fuse-prelu"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.prelu.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> PreluSite | Miss:
        """Match a PReLU of an open fused op."""
        a = arguments(node)
        fused = open_product(a["self"], node)
        if isinstance(fused, Miss):
            return fused
        slopes = node_of(a["weight"])
        if dtype_of(slopes) != dtype_of(fused.node):
            text = "slopes of {} for values of {}"
            told = dtype_of(slopes), dtype_of(fused.node)
            return Miss(MissCode.DTYPE, slopes, text, *told, progress=3)
        shape = _broadcast(tuple(shape_of(slopes)), len(shape_of(node)))
        refusal = refuse_shape(fused, slopes, shape, "slope")
        return refusal or PreluSite(fused, node, slopes, shape)

    def rewrite(self, site: PreluSite, rw: Rewriter) -> None:
        """Replace the activation by the extended op."""
        slopes = site.slopes
        if tuple(shape_of(slopes)) != site.shape:
            value = constant_of(slopes)
            if value is None:
                slopes = rw.call(aten.view.default, slopes, list(site.shape))
            else:
                slopes = rw.constant(value.reshape(site.shape), f"{slopes.target}_per_channel")
        step = Prelu(len(site.fused.extras))
        append_op(site.fused, site.node, step, rw, (slopes,))


def _broadcast(shape: tuple[Size, ...], rank: int) -> tuple[Size, ...]:
    """Return the shape in which torch broadcasts slopes along axis 1, or a single one."""
    size = shape[0] if shape else 1
    if rank <= CHANNELS or size == 1:
        return (1,)
    return (size, *(1,) * (rank - CHANNELS - 1))
