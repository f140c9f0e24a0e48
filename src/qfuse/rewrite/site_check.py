"""Check one rewrite by values: the region before and after, on real activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Self

import torch
from torch.fx import Node

from qfuse.ir.events import Checked, Exactness
from qfuse.ir.graph.stage_graph import StageGraph
from qfuse.ir.ops.activation import as_activation
from qfuse.ir.ops.epilogue import Round
from qfuse.ir.ops.views import result_of, tensor_of
from qfuse.ir.out_of_memory import shortage_of
from qfuse.rewrite.compare import Verdict, compare, compare_rounded
from qfuse.rewrite.rewriter import Journal
from qfuse.rewrite.tolerance import MOST_MOVED, SITE
from qfuse.rewrite.values import (
    Values,
    long_sum_value,
    meeting_points,
    region_value,
    wide_value,
)

_RUNS = 12
"""How often ties are looked for. Each run finds about half of them; all but 1 in 4096 are found."""


@dataclass(frozen=True, slots=True)
class _Region:
    """What is evaluated: one result of a node, from the values at which it begins."""

    old: Node
    start: frozenset[Node]
    index: int


@dataclass(frozen=True, slots=True)
class _Moves:
    """How far a value moves when the floats that it is made of move by one unit in the last place.

    Attributes:
        down: How far it becomes less.
        up: How far it becomes more.
    """

    down: torch.Tensor
    up: torch.Tensor

    @classmethod
    def between(cls, truth: torch.Tensor, moved: torch.Tensor) -> Self:
        """Return the move from ``truth`` to ``moved``; 0 if one of the two is not finite."""
        apart = moved.double() - truth.double()
        apart = torch.nan_to_num(apart, nan=0.0, posinf=0.0, neginf=0.0)
        return cls((-apart).clamp(min=0), apart.clamp(min=0))

    def joined(self, other: Self) -> Self:
        """Return the farther move of two in each direction."""
        pairs = ((self.down, other.down), (self.up, other.up))
        return type(self)(*(torch.maximum(a, b) for a, b in pairs))

    @property
    def most(self) -> torch.Tensor:
        """The farther one of both directions."""
        return torch.maximum(self.down, self.up)

    def explain(self, apart: torch.Tensor) -> torch.Tensor:
        """Whether values that are ``apart`` from the truth are where a tie takes them."""
        reach = torch.where(apart > 0, self.up, self.down)
        # Steps are whole, so half of one tells them apart whatever the noise is.
        return (reach > 0) & (apart.abs() <= 1.5 * reach)


class SiteChecker:
    """Checks every rewrite on the values that the example inputs produce there.

    Args:
        program: The graph that is being rewritten.
        inputs: One real tensor per placeholder.
    """

    def __init__(self, program: StageGraph, inputs: Sequence[torch.Tensor]) -> None:
        self._log = program.log
        self._values = Values(program.module, inputs)

    def check(self, journal: Journal, exactness: Exactness, what: str) -> str | None:
        """Compare replaced values with their replacements; return what is wrong, or ``None``."""
        for old, new in journal.replaced:
            # Evaluate both from the same values: values cached further down may come from a matmul
            # that has since been replaced and rounds differently.
            start = meeting_points(old, new)
            truth = None
            # Exact rewrites are compared in bits with the source itself, rounding included.
            if exactness is Exactness.ROUNDING:
                truth = wide_value(old, self._values, start)
            before = _tensors(region_value(old, self._values, start))
            try:
                after = _tensors(region_value(new, self._values, start))
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                if shortage_of(error) is not None:
                    raise
                # Shapes and dtypes fit, as infer has shown; some ops refuse values or layouts too.
                verdict = Verdict(f"the new ops do not run: {error}")
                return self._judge(verdict, exactness, what)
            wide = _tensors(truth) if truth is not None else (None,) * len(before)
            step = _last_step(old) if exactness is Exactness.ROUNDING else None
            for index, parts in enumerate(zip(after, before, wide, strict=True)):
                region = _Region(old, start, index)
                verdict = self._compare(*parts, exactness, region, step)
                wrong = self._judge(verdict, exactness, what)
                if wrong is not None:
                    return wrong
        return None

    def _compare(
        self,
        new: torch.Tensor,
        old: torch.Tensor,
        truth: torch.Tensor | None,
        exactness: Exactness,
        region: _Region,
        step: Node | None,
    ) -> Verdict:
        scale = None if step is None else self._values.of(step)
        verdict = _verdict(new, old, truth, exactness, scale)
        if truth is None or torch.equal(new, old):
            return verdict
        if verdict.wrong is not None and step is None and truth.is_floating_point():
            return self._with_more_noise(new, old, truth, region)
        # Scales such as 0.02 and 0.05 put many values on a tie, which may fall either way, in the
        # source too. The other values are judged without them.
        is_rounded = step is not None or not truth.is_floating_point()
        ties = self._ties(region, truth) if is_rounded else None
        if ties is None:
            return verdict
        now, then = (_without_ties(value, truth, ties) for value in (new, old))
        return _verdict(now, then, truth, exactness, scale)

    def _with_more_noise(
        self, new: torch.Tensor, old: torch.Tensor, truth: torch.Tensor, region: _Region
    ) -> Verdict:
        """Judge once more, with the errors of other ways to compute the same.

        One is that of long sums in another order. The other one comes of the values themselves: the
        source may be exact by luck where a function or a sum of both signs amplifies every error.
        """
        summed = long_sum_value(region.old, self._values, region.start)
        others = [old] if summed is None else [old, _tensors(summed)[region.index]]
        noise = torch.stack([_apart(value, truth) for value in others]).amax(0)
        moves = self._moves(region, truth)
        if moves is not None:
            noise = torch.maximum(noise, _without_steps(moves.most, truth))
        return compare(new, old, truth, Exactness.ROUNDING, SITE, noise=noise)

    def _ties(self, region: _Region, truth: torch.Tensor) -> _Moves | None:
        """Return how far ties move ``truth``, or ``None`` if nothing is on one.

        A source that quantizes bfloat16 rounds before: 7.492 steps may be 7.505 then, or still 7.46
        with an operand that was rounded too. Both are right, so both ways are looked at: from the
        exact number, and from the exact number rounded once.
        """
        found = [self._moves(region, truth, narrow=narrow) for narrow in (False, True)]
        ties = [moves for moves in found if moves is not None]
        return reduce(_Moves.joined, ties) if ties else None

    def _moves(
        self, region: _Region, truth: torch.Tensor, *, narrow: bool = False
    ) -> _Moves | None:
        """Return how far ``truth`` moves when the floats that it is made of move by one ulp.

        Args:
            region: What is evaluated.
            truth: Its value.
            narrow: Whether the result is also rounded once, to the dtype that is quantized.

        Returns:
            The distances, or ``None`` if it does not move.
        """
        moves = _Moves.between(truth, truth)
        for seed in range(_RUNS):
            moved = wide_value(region.old, self._values, region.start, shaken=seed, narrow=narrow)
            if moved is None:
                return None
            moves = moves.joined(_Moves.between(truth, _tensors(moved)[region.index]))
            if not bool(moves.most.any()):
                return None
        return moves

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


def _verdict(
    new: torch.Tensor,
    old: torch.Tensor,
    truth: torch.Tensor | None,
    exactness: Exactness,
    step: torch.Tensor | None,
) -> Verdict:
    if step is not None and old.is_floating_point():
        return compare_rounded(new, old, truth, step, SITE)
    return compare(new, old, truth, exactness, SITE)


def _without_ties(value: torch.Tensor, truth: torch.Tensor, ties: _Moves) -> torch.Tensor:
    """Return ``value`` with the truth where a tie explains that it is a step away."""
    explained = ties.explain(value.double() - truth.double())
    return torch.where(explained, truth.to(value.dtype), value)


def _apart(value: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return how far values are from the truth; 0 if one of the two is not finite."""
    apart = (value.double() - truth.double()).abs()
    return torch.nan_to_num(apart, nan=0.0, posinf=0.0)


def _without_steps(moves: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return ``moves`` with 0 for those that are too large for the rounding of an operand."""
    sizes = torch.nan_to_num(truth.double(), nan=0.0, posinf=0.0, neginf=0.0).abs()
    return torch.where(moves <= MOST_MOVED * sizes.max(), moves, torch.zeros_like(moves))


def _last_step(node: Node) -> Node | None:
    """Return the scale if the float result of ``node`` ends with a rounding, else ``None``."""
    result = result_of(node)
    fused = as_activation(node if result is None else result[0])
    # A result that is stored quantized is compared by its steps anyway.
    if fused is None or fused.output.spec is not None or not fused.epilogue.ops:
        return None
    last = fused.epilogue.ops[-1]
    if not isinstance(last, Round) or tensor_of(fused.extras[last.scale]).numel() != 1:
        return None
    return fused.extras[last.scale]


def _tensors(value: object) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a node's value, which is one or a tuple of them."""
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(p for p in parts if isinstance(p, torch.Tensor))
