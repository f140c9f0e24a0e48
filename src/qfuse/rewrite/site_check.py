"""Prove one rewrite by values: the region before against the region after, on real activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from qfuse.ir.events import Checked, Exactness
from qfuse.rewrite.compare import Verdict, compare
from qfuse.rewrite.tolerance import SITE
from qfuse.rewrite.values import Values, wide_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Node

    from qfuse.ir.program import StageGraph
    from qfuse.rewrite.rewriter import Journal

__all__ = ["SiteChecker"]


class SiteChecker:
    """Checks every rewrite on the values that the example inputs really produce there.

    Args:
        program: The graph that is being rewritten.
        inputs: One real tensor per placeholder.
    """

    def __init__(self, program: StageGraph, inputs: Sequence[torch.Tensor]) -> None:
        self._log = program.log
        self._values = Values(program.module, inputs)

    def check(self, journal: Journal, exactness: Exactness, what: str) -> str | None:
        """Compare what the rewrite replaced with what it made; return what is wrong."""
        made = frozenset(journal.made)
        boundary = frozenset(n for new in made for n in new.all_input_nodes) - made
        for old, new in journal.replaced:
            truth = None
            if exactness is Exactness.ROUNDING:
                truth = wide_value(old, self._values, boundary | _alive(old))
            before, after = _tensors(self._values.of(old)), _tensors(self._values.of(new))
            wide = _tensors(truth) if truth is not None else (None,) * len(before)
            for parts in zip(after, before, wide, strict=True):
                wrong = self._judge(compare(*parts, exactness, SITE), exactness, what)
                if wrong is not None:
                    self._values.forget(made)
                    return wrong
        return None

    def _judge(self, verdict: Verdict, exactness: Exactness, what: str) -> str | None:
        wrong = verdict.wrong
        self._log.add(
            Checked(
                "check",
                what,
                wrong is None,
                exactness,
                verdict.error,
                verdict.allowed,
                wrong or "",
            )
        )
        return wrong

    def forget(self, nodes: Sequence[Node]) -> None:
        """Drop the values of erased nodes."""
        self._values.forget(nodes)


def _alive(old: Node) -> frozenset[Node]:
    """Return the nodes above ``old`` that others read: they stay, and bound the region."""
    bound: set[Node] = set()
    region = {old}
    stack = list(old.all_input_nodes)
    while stack:
        node = stack.pop()
        if node in region or node in bound:
            continue
        if all(user in region for user in node.users):
            region.add(node)
            stack.extend(node.all_input_nodes)
        else:
            bound.add(node)
    return frozenset(bound)


def _tensors(value: object) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a node's value, which is one or a tuple of them."""
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(p for p in parts if isinstance(p, torch.Tensor))
