"""Clamp a computed zero point to the range that it has anyway."""

from __future__ import annotations

import math

import torch

from qfuse.ir.graph.schema import is_call
from qfuse.normalize.aten.qdq.choose_asymmetric import (
    EPS,
    FROM,
    HIGH,
    LOW,
    SHIFTED,
    STEP,
    TOP,
    Extreme,
)
from qfuse.rewrite.pattern import Capture, Match, PatternRule, guard, let
from qfuse.rewrite.pattern import match as search
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rewriter, arguments, aten

_CLAMPS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)
_SHIFTS = (aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.neg.default)
_WIDE = (torch.float32, torch.float64)
# Three roundings of a quotient of up to this many steps stay below half a step.
_MOST = 1 << 16
RANGE = Capture["tuple[int, int]"]("range")


@guard(MissCode.PATTERN, "it is clamped or shifted by its users")
def _is_last(node: Node) -> bool:
    users = list(node.users)
    return bool(users) and not any(is_call(user, *_CLAMPS) or _shifts(user) for user in users)


def _shifts(user: Node) -> bool:
    """Whether ``user`` adds a number to a zero point, or negates it."""
    if not is_call(user, *_SHIFTS):
        return False
    return not isinstance(arguments(user).get("other"), Node)


def _range(node: Node, scale: Node, low: Extreme, match: Match) -> tuple[int, int] | Miss:
    """Return the range of a zero point, whose scale is a step of its interval."""
    step = search(STEP, scale)
    if isinstance(step, Miss):
        return step
    high, steps, least, start = step[HIGH], step[TOP], step[EPS], match[FROM]
    if step[LOW] != low or high.x is not low.x or high.rows != low.rows:
        return Miss(MissCode.PATTERN, scale, "the scale is one of another interval")
    # A step below the normal numbers would be off by more than a rounding.
    normal = torch.finfo(torch.float32).tiny <= least < math.inf
    if not normal or steps != int(steps) or start != int(start) or not 0 < steps <= _MOST:
        text = "the scale is a part of {}, and at least {}"
        return Miss(MissCode.ARGUMENT, node, text, steps, least)
    return int(start), int(start) + int(steps)


class ClampZeroPoint(PatternRule):
    """``round(-low / scale)`` becomes ``clamp(round(-low / scale), 0, 255)``.

    Before::

        low = min(amin(x), 0), high = max(amax(x), 0)
        low, clamp((high - low) / 255, min=eps) -> div -> neg -> round

    After::

        low, clamp((high - low) / 255, min=eps) -> div -> neg -> round -> clamp(0, 255)

    The bounds tell kernels that the zero point is one of the type that it is stored in.

    Rounding: no value changes, but the sign of a zero may. The quotient is at most 255 and three
    roundings of float32.

    Refuses: narrower types, in which roundings may exceed the range; an interval that may lack
    zero; a scale without a least value; a zero point that is clamped, or shifted by a number.
    """

    name = "clamp-zero-point"
    exactness = Exactness.ROUNDING
    # Any rounding looks like the start of a zero point: what is none is not reported.
    pattern = SHIFTED.given(_is_last, let(RANGE, _range)).core().giving(*_WIDE)

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Add the clamp."""
        with rw.before(min(site.node.users)):
            rw.replace(site.node, rw.call(aten.clamp.default, site.node, *site[RANGE]))
