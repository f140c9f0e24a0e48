"""What is told of a miss, and rules."""

from __future__ import annotations

from tests.support.graphs.board import (
    HIGH,
    INT8,
    LOW,
    Board,
    S,
    X,
    Y,
    Z,
    aten,
    hit,
    miss,
)
from torch.fx import Node

from qfuse.ir.events import Exactness, MissCode
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.pattern import (
    Either,
    Match,
    Opt,
    Pattern,
    PatternRule,
    cast,
    explain_miss,
    op,
    where,
)
from qfuse.rewrite.rewriter import Rewriter
from qfuse.rewrite.rule import Miss


def test_the_core_decides_what_is_this_rules_business(on: Board) -> None:
    pattern = op(aten.neg.default, op(aten.round.default, op(aten.abs.default, X)).core())
    assert miss(pattern, on.neg(on.x)).progress == 0
    assert miss(pattern, on.neg(on.round(on.x))).progress == 2
    rooted = op(aten.neg.default, op(aten.round.default, X))
    assert miss(rooted, on.neg(on.x)).progress == 1
    assert miss(rooted, on.round(on.x)).progress == 0


def test_guards_before_the_core_belong_to_it(on: Board) -> None:
    silent = where(lambda s: s.name == "y", MissCode.AXIS, "it is not y")
    loud = where(lambda x: x.name == "x", MissCode.SHAPE, "it is not x")
    pattern = (op(aten.neg.default, X) * S).given(silent).core().given(loud)
    assert miss(pattern, on.mul(on.neg(on.x), on.x)).progress == 0
    found = miss(pattern, on.mul(on.neg(on.y), on.y))
    assert (found.code, found.progress) == (MissCode.SHAPE, 5)
    leaf = op(aten.neg.default, S.given(silent).core()) - Y
    assert miss(leaf, on.sub(on.neg(on.x), 1)).progress == 0
    assert miss(leaf, on.sub(on.neg(on.y), 1)).progress == 3


def chain() -> Pattern:
    scaled = Either(X / S, X * op(aten.reciprocal.default, S))
    codes = op(aten.clamp.default, op(aten.round.default, scaled) + Opt(Z), LOW, HIGH)
    return cast(codes, INT8)


def test_a_pattern_shows_where_it_failed(on: Board) -> None:
    scaled = on.clamp(on.round(on.floor(on.div(on.x, on.y))), -8, 7)
    assert explain_miss(miss(chain(), on.to(scaled, INT8))) == (
        "cast(clamp((round({(x / s) | (x * reciprocal(s))}) + z)?, low, high), int8)\n"
        "                  ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ "
        "expected aten.div.Tensor or aten.mul.Tensor, found aten.floor (%floor_default)"
    )
    open_above = on.clamp(on.round(on.div(on.x, on.y)), -8)
    assert explain_miss(miss(chain(), on.to(open_above, INT8))).splitlines()[1] == (
        " " * 63 + "^^^^ expected a number for high, found None (%clamp_default_1)"
    )
    assert explain_miss(Miss(MissCode.AXIS, on.x, "no pattern")) == "no pattern"


def test_a_long_pattern_is_cut_around_the_caret(on: Board) -> None:
    pattern = op(aten.neg.default, X)
    node = on.neg(on.x)
    for _ in range(40):
        pattern, node = op(aten.neg.default, pattern), on.neg(node)
    text, caret = explain_miss(
        miss(op(aten.abs.default, pattern), on.abs(on.neg(on.x)))
    ).splitlines()
    assert len(text) < 110
    assert text[caret.index("^") : caret.rindex("^") + 1] == "neg"


def test_the_whole_chain(on: Board) -> None:
    scaled = on.mul(on.reciprocal(on.y), on.x)
    codes = on.clamp(on.add(on.round(scaled), 3), -8, 7)
    found = hit(chain(), on.to(codes, INT8))
    assert (found[X], found[S], found[Z], found[LOW]) == (on.x, on.y, 3, -8)


# A rule


class Silu(PatternRule):
    """``x * sigmoid(x)`` becomes ``silu(x)``."""

    name = "silu"
    exactness = Exactness.ROUNDING
    pattern = X * op(aten.sigmoid.default, X).core()

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        rw.replace(site.node, rw.call(aten.silu.default, site[X]))


def test_a_rule_is_tried_at_the_ops_that_its_pattern_starts_with(on: Board) -> None:
    assert Silu.anchors == (aten.mul.Tensor,)
    program = on.b.done(on.mul(on.sigmoid(on.x), on.x), on.mul(on.sigmoid(on.x), on.y))
    result = apply_rules(program, [Silu()])
    assert result.fired == {"silu": 1}
    assert [(name, found.code) for name, found in result.misses] == [("silu", MissCode.PATTERN)]


def far(pattern: Pattern, node: Node) -> tuple[int, int]:
    found = miss(pattern, node)
    return found.held, found.conditions


def test_how_many_of_the_conditions_hold(on: Board) -> None:
    deep = op(aten.neg.default, op(aten.round.default, op(aten.abs.default, X)))
    assert far(deep, on.neg(on.x)) == (1, 4)
    assert far(deep, on.neg(on.round(on.x))) == (2, 4)

    # What is nested in a sibling that was not reached is counted too.
    both = op(aten.neg.default, X) + op(aten.abs.default, Y)
    assert far(both, on.add(on.round(on.x), on.round(on.y))) == (1, 5)
    assert far(both, on.add(on.neg(on.x), on.round(on.y))) == (3, 5)
    assert far(both, on.add(on.round(on.y), on.neg(on.x))) == (3, 5)


def test_guards_and_defaults_are_conditions(on: Board) -> None:
    true = where(lambda x: x.name == "x", MissCode.SHAPE, "it is not x")
    false = where(lambda x: x.name == "y", MissCode.SHAPE, "it is not y")
    first = op(aten.neg.default, X)
    assert far(first.given(true, false, true), on.neg(on.x)) == (3, 5)
    assert far(first.given(true) + op(aten.abs.default, Y), on.add(on.neg(on.x), on.y)) == (4, 6)
    assert far(X + Y, on.add(on.x, on.y, alpha=2)) == (3, 4)


def test_of_alternatives_the_one_that_was_tried_is_counted(on: Board) -> None:
    scaled = op(aten.round.default, Either(X / S, X * op(aten.reciprocal.default, S)))
    assert far(scaled, on.round(on.abs(on.x))) == (1, 4)
    assert far(scaled, on.round(on.mul(on.x, on.abs(on.y)))) == (3, 5)


def test_the_events_of_misses_say_how_far_they_came(on: Board) -> None:
    class Never(PatternRule):
        name = "never"
        exactness = Exactness.EXACT
        pattern = op(aten.neg.default, op(aten.abs.default, X))

        def rewrite(self, site: Match, rw: Rewriter) -> None:
            raise AssertionError(site, rw)

    program = on.b.done(on.neg(on.x))
    (event,) = apply_rules(program, [Never()]).missed
    assert (event.held, event.conditions) == (1, 3)
    assert event.how_far == "1 of 3 conditions hold"
