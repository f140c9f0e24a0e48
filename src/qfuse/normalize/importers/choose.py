"""Rules for ops that choose a scale and a zero point: their site and their edit."""

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
        x: What it reads.
        spec: What it computes.
        results: The nodes of its results, each with its index: 0 is the scale, 1 the zero point.
    """

    x: Node
    spec: ChooseSpec
    results: tuple[tuple[int, Node], ...]


class ChooseRule(SourceRule[ChooseSite], ABC):
    """Replaces a source op by ``qfuse.choose_qparams``, which gives one entry per block.

    Readers that want another shape get a view; those that are normalized later see through it.
    """

    def rewrite(self, site: ChooseSite, rw: Rewriter) -> None:
        """Choose canonically, and give every reader the shape that it had."""
        chosen = rw.call(ops.choose_qparams, site.x, str(site.spec))
        for index, old in site.results:
            rw.replace(old, reshaped(rw, rw.item(chosen, index), shape_of(old)))


def results_of(node: Node, count: int = 2) -> tuple[tuple[int, Node], ...]:
    """Return the results of an op that gives ``count`` tensors, as far as somebody reads them.

    Raises:
        RefusedError: The tuple itself is read.
    """
    found = []
    for user in node.users:
        if user.target is not operator.getitem or not isinstance(user.args[1], int):
            text = "its {} results are read together"
            raise RefusedError(MissCode.PATTERN, user, text, count)
        found.append((user.args[1] % count, user))
    return tuple(found)
