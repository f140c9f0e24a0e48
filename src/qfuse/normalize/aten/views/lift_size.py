"""Read dynamic sizes of the earliest tensor that has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.ops.views import node_of
from qfuse.ir.sizes import Size, same_size
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
class SizeSite:
    """A size that is read, and a tensor before that has the same size along an axis."""

    node: Node
    source: Node
    axis: int


class LiftSize(Rule[SizeSite]):
    """``sym_size(op(x), i)`` becomes ``sym_size(x, j)`` where the sizes are equal.

    Before::

        x -> dequantize -+- relu
                         '- sym_size

    After::

        x -+- dequantize -- relu
           '- sym_size

    What is read for its size alone has one user less, so it can be fused with the others.

    Refuses: a size that no operand has for all values of the symbols.
    """

    name = "lift-size"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.sym_size.int,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> SizeSite | Miss:
        """Match a dynamic size that an operand of the tensor has as well."""
        size = node.meta["val"]
        first = node_of(arguments(node)["self"])
        found: tuple[Node, int] | None = None
        step = _axis_before(first, size)
        while step is not None:
            found = step
            step = _axis_before(found[0], size)
        if found is None:
            return Miss(MissCode.PATTERN, node, "no operand has this size", progress=0)
        return SizeSite(node, *found)

    def rewrite(self, site: SizeSite, rw: Rewriter) -> None:
        """Read the size of the other tensor."""
        rw.replace(site.node, rw.call(aten.sym_size.int, site.source, site.axis))


def _axis_before(node: Node, size: Size) -> tuple[Node, int] | None:
    """Return an operand of ``node`` that has this size, with the axis."""
    if isinstance(size, int):
        return None
    for operand in _operands(node):
        for axis, own in enumerate(operand.meta["val"].shape):
            if same_size(own, size):
                return operand, axis
    return None


def _operands(node: Node) -> Iterator[Node]:
    """Yield the tensors that ``node`` is computed from; for a result, those of the op."""
    for operand in node.all_input_nodes:
        if isinstance(operand.meta.get("val"), torch.Tensor):
            yield operand
        elif isinstance(operand.meta.get("val"), (tuple, list)):
            yield from _operands(operand)
