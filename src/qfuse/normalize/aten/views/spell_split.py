"""Parts of weights, such as those of queries, keys and values that are stored as one."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from qfuse.ir.movement.base import Movement
from qfuse.ir.movement.registry import SPLITS, movement_of
from qfuse.ir.ops.constants import is_constant_expression
from qfuse.ir.ops.views import node_of
from qfuse.rewrite.node_mover import NodeMover
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    arguments,
)


@dataclass(frozen=True, slots=True)
class SplitWeight:
    """A split of a weight.

    Attributes:
        node: The split.
        source: The weight.
        parts: The slices or selects that its parts are.
    """

    node: Node
    source: Node
    parts: tuple[Movement, ...]


class SpellSplit(Rule[SplitWeight]):
    """``split(w)[i]`` of a weight becomes ``slice(w)``, and ``unbind(w)[i]`` ``select(w)``.

    Before::

        const w -> dequantize -> split --+-- [0] -> linear
                                         '-- [1] -> linear

    After::

        const w -> dequantize -+- slice -> linear
                               '- slice -> linear

    Each part is then a weight like any other. Activations stay split, since ops on their parts may
    become one op on the whole.

    Exact: a part is the same view of the same memory.

    Refuses: a split of what is computed at run time.
    """

    name = "spell-split"
    anchors: ClassVar[tuple[OpOverload, ...]] = SPLITS
    exactness = Exactness.EXACT

    def match(self, node: Node) -> SplitWeight | Miss:
        """Match a split of a constant expression."""
        source = node_of(arguments(node)["self"])
        if not is_constant_expression(source):
            text = "it splits what is computed at run time"
            return Miss(MissCode.NOT_CONSTANT, node, text, progress=0)
        # Parts without users are not read.
        items = [user for user in node.users if user.target is operator.getitem and user.users]
        parts = [part for part in map(movement_of, items) if part is not None]
        if not parts:
            return Miss(MissCode.PATTERN, node, "none of its parts is read", progress=0)
        return SplitWeight(node, source, tuple(parts))

    def rewrite(self, site: SplitWeight, rw: Rewriter) -> None:
        """Read each part by itself."""
        mover = NodeMover(rw)
        for part in site.parts:
            rw.replace(part.node, part.apply(mover, site.source))
