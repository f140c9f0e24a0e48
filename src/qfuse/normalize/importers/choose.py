"""Shared code of the rules for ops that choose a scale and a zero point."""

from __future__ import annotations

import operator
from abc import ABC
from dataclasses import dataclass

from qfuse.ir.ops import library as ops
from qfuse.ir.ops.views import shape_of
from qfuse.ir.quant.choose import ChooseSpec
from qfuse.normalize.importers.qparams import reshaped
from qfuse.normalize.importers.rule import RefusedError, SourceRule
from qfuse.rewrite.prelude import MissCode, Node, Rewriter


@dataclass(frozen=True, slots=True)
class ChooseSite:
    """A source op that chooses parameters.

    Attributes:
        x: Its operand.
        spec: Its computation.
        results: The nodes of its results, each with its index: 0 is the scale, 1 the zero point.
    """

    x: Node
    spec: ChooseSpec
    results: tuple[tuple[int, Node], ...]


class ChooseRule(SourceRule[ChooseSite], ABC):
    """Replaces a source op by ``qfuse.choose_qparams``, which returns one entry per block.

    Users that need another shape get a view; rules that match them later look through it.
    """

    def rewrite(self, site: ChooseSite, rw: Rewriter) -> None:
        """Add the canonical op, and restore the shape of every result."""
        chosen = rw.call(ops.choose_qparams, site.x, str(site.spec))
        for index, old in site.results:
            rw.replace(old, reshaped(rw, rw.item(chosen, index), shape_of(old)))


def used_results(node: Node, count: int = 2) -> tuple[tuple[int, Node], ...]:
    """Return those results of an op with ``count`` results that have users.

    Raises:
        RefusedError: The tuple itself has a user.
    """
    found = []
    for user in node.users:
        if user.target is not operator.getitem or not isinstance(user.args[1], int):
            text = "its {} results are used as one tuple"
            raise RefusedError(MissCode.PATTERN, user, text, count)
        # A graph may name the last result -1.
        found.append((user.args[1] % count, user))
    return tuple(found)
