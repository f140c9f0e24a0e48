"""The ops that commute with quantization. A new family of ops is one line here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from qfuse.optimize.commute.base import Commutes
from qfuse.optimize.commute.cast import CommutingCast
from qfuse.optimize.commute.clamp import Clamp
from qfuse.optimize.commute.join import CommutingJoin
from qfuse.optimize.commute.movement import MovementOp
from qfuse.optimize.commute.pad import Pad
from qfuse.optimize.commute.pool import Pool
from qfuse.optimize.commute.split import Split
from qfuse.rewrite.prelude import Miss, Node

Families: TypeAlias = Sequence[type[Commutes]]

COMMUTING: tuple[type[Commutes], ...] = (
    Split,
    CommutingJoin,
    Pad,
    CommutingCast,
    Clamp,
    Pool,
    # Last: it misses ops that move elements and that no family above supports.
    MovementOp,
)


def commuting(node: Node, families: Families) -> Commutes | Miss | None:
    """View a node as the op of a family; ``None`` if it belongs to none."""
    return next((found for kind in families if (found := kind.of(node)) is not None), None)
