"""Products of two quantized activations, one of which is expanded along batch axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qfuse.ir.movement.base import Movement, unsqueeze
from qfuse.ir.movement.reshape import Copy, Expand, Permute
from qfuse.ir.ops.matmul import MATMULS, Matmul, as_matmul
from qfuse.ir.ops.views import shape_of
from qfuse.ir.sizes import broadcast_shape, same_shape, same_size
from qfuse.patterns.quantized_operand import (
    is_scaled_activation,
    moved_operand,
    reapply_movements,
)
from qfuse.rewrite.node_mover import NodeMover
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    aten,
)

_MATRIX = 2


@dataclass(frozen=True, slots=True)
class ExpandedOperand:
    """A product, one operand of which is expanded.

    Attributes:
        product: The product.
        side: The operand: ``x`` or ``other``.
        expand: The expansion.
        movements: The copies and permutations after it, from the last one to the first.
    """

    product: Matmul
    side: str
    expand: Expand
    movements: tuple[Movement, ...]

    @property
    def operand(self) -> Node:
        """The operand as it is multiplied."""
        return getattr(self.product, self.side)  # type: ignore[no-any-return]

    @property
    def repeated(self) -> frozenset[int]:
        """The axes of the operand that the expansion repeats or adds."""
        before, after = self.expand.before, self.expand.after
        fresh = len(after) - len(before)
        axes = {
            axis
            for axis, size in enumerate(after)
            if axis < fresh or not same_size(before[axis - fresh], size)
        }
        for movement in reversed(self.movements):
            if isinstance(movement, Permute):
                axes = {movement.dims.index(axis) for axis in axes}
        return frozenset(axes)


class DropBatchExpand(Rule[ExpandedOperand]):
    """``q @ k.expand(b, h, s, d).mT`` becomes ``q @ k.mT``, which broadcasts by itself.

    Before::

        q ---------------------------------.
        k -> expand -> [copy] -> permute --+-> matmul

    After::

        q -----------------------.
        k -> [copy] -> permute --+-> matmul

    Both operands are quantized activations. The values of an operand that is not expanded are read
    where they are stored, once for all heads.

    Refuses: an expansion of the axes that are multiplied; one that gives the result its batch.
    """

    name = "drop-batch-expand"
    anchors: ClassVar[tuple[OpOverload, ...]] = MATMULS
    exactness = Exactness.EXACT
    # A library may multiply broadcast operands in another order.
    proof = Exactness.ROUNDING

    def match(self, node: Node) -> ExpandedOperand | Miss:
        """Match a product of two quantized activations with an expanded operand."""
        product = as_matmul(node)
        assert product is not None, "the anchor is a product"
        sites = [_expanded(product, side) for side in ("x", "other")]
        found = [site for site in sites if site is not None]
        if not found or not all(map(is_scaled_activation, (product.x, product.other))):
            text = "it is not a product of two quantized activations with an expanded operand"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        refused = [_refuse(site) for site in found]
        for site, miss in zip(found, refused, strict=True):
            if miss is None:
                return site
        assert refused[0] is not None, "all are refused"
        return refused[0]

    def rewrite(self, site: ExpandedOperand, rw: Rewriter) -> None:
        """Multiply what is expanded."""
        product, expand = site.product, site.expand
        fresh = len(expand.after) - len(expand.before)
        value = unsqueeze(NodeMover(rw), expand.source, [0] * fresh)
        value = reapply_movements(rw, site.movements, value)
        operands = [value, product.other] if site.side == "x" else [product.x, value]
        # `bmm` does not broadcast.
        rw.replace(product.node, rw.call(aten.matmul.default, *operands))


def _expanded(product: Matmul, side: str) -> ExpandedOperand | None:
    movements, _ = moved_operand(getattr(product, side))
    for count, movement in enumerate(movements):
        if isinstance(movement, Expand):
            site = ExpandedOperand(product, side, movement, movements[:count])
            # Another expansion above may be one that repeats.
            if site.repeated:
                return site
        if not isinstance(movement, (Copy, Permute)):
            break
    return None


def _refuse(site: ExpandedOperand) -> Miss | None:
    node, shape = site.product.node, list(shape_of(site.operand))
    rest = shape_of(site.product.other if site.side == "x" else site.product.x)
    if min(len(shape), len(rest)) < _MATRIX or max(site.repeated) >= len(shape) - _MATRIX:
        text = "the expansion repeats axes that are multiplied"
        return Miss(MissCode.AXIS, site.expand.node, text, progress=2)
    for axis in site.repeated:
        shape[axis] = 1
    batch = broadcast_shape(shape[:-_MATRIX], rest[:-_MATRIX])
    if batch is None or not same_shape(batch, shape_of(node)[:-_MATRIX]):
        text = "the result has its batch axes only from the expanded operand"
        return Miss(MissCode.SHAPE, site.expand.node, text, progress=2)
    return None
