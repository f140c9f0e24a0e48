"""Conditions on what was captured."""

from __future__ import annotations

import pytest
import torch
from tests.support.graphs.board import (
    HIGH,
    LOW,
    Board,
    S,
    X,
    Y,
    aten,
    hit,
    told,
)
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.rewrite.pattern import (
    CAST,
    Capture,
    Path,
    PatternRule,
    check,
    guard,
    let,
    op,
    single_use,
    through,
    where,
)
from qfuse.rewrite.rule import Miss


def test_guards_read_captures_and_have_a_code_and_a_sentence(on: Board) -> None:
    clamp = op(aten.clamp.default, X, LOW, HIGH).given(
        where(lambda low, high: low <= high, MissCode.RANGE, "{low} is over {high} of {x.shape}"),
        where(lambda low: low < 0, MissCode.ZERO_POINT, "{x} has no {low}", at="x"),
    )
    hit(clamp, on.clamp(on.x, -1, 1))
    assert told(clamp, on.clamp(on.x, 1, -1)) == (
        MissCode.RANGE,
        "clamp_default_1",
        "1 is over -1 of (4, 8)",
    )
    assert told(clamp, on.clamp(on.x, 1, 2)) == (MissCode.ZERO_POINT, "x", "placeholder has no 1")


def test_a_guard_may_be_a_decorated_function(on: Board) -> None:
    @guard(MissCode.RANGE, "{low} is not negative", at="x")
    def negative(low: float) -> bool:
        return low < 0

    clamp = op(aten.clamp.default, X, LOW, HIGH).given(negative)
    assert told(clamp, on.clamp(on.x, 1, 2)) == (MissCode.RANGE, "x", "1 is not negative")


def test_a_guard_is_part_of_the_match(on: Board) -> None:
    # The first order matches and its guard refuses; the second one fits.
    second = where(lambda s: s.name == "x", MissCode.AXIS, "it is not x")
    assert hit((Y + S).given(second), on.add(on.x, on.y))[S] is on.x


def test_values_are_computed_from_captures(on: Board) -> None:
    width: Capture[int] = Capture("width")

    def span(low: int, high: int, node: Node) -> int | Miss:
        return high - low if high > low else Miss(MissCode.RANGE, node, "an empty {}", "range")

    clamp = op(aten.clamp.default, X, LOW, HIGH).given(let(width, span))
    assert hit(clamp, on.clamp(on.x, -1, 2))[width] == 3
    assert told(clamp, on.clamp(on.x, 2, 1))[2] == "an empty range"
    even = clamp.given(where(lambda width: width % 2 == 0, MissCode.AXIS, "{width} is odd"))
    assert told(op(aten.neg.default, even), on.neg(on.clamp(on.x, 0, 3)))[2] == "3 is odd"


def test_a_check_may_make_its_own_miss(on: Board) -> None:
    def is_x(x: Node) -> Miss | None:
        return None if x.name == "x" else Miss(MissCode.AXIS, x, "it is {}", x.name)

    pattern = op(aten.neg.default, X).given(check(is_x))
    hit(pattern, on.neg(on.x))
    assert told(pattern, on.neg(on.y)) == (MissCode.AXIS, "y", "it is y")


def test_what_has_other_users_is_told(on: Board) -> None:
    path: Capture[Path] = Capture("path")
    inner = through(op(aten.neg.default, X), CAST, path=path)
    pattern = op(aten.abs.default, inner).given(single_use("path"))
    core = on.neg(on.x)
    wide = on.to(core, torch.float64)
    node = on.abs(wide)
    hit(pattern, node)
    on.relu(wide)
    assert told(pattern, node) == (MissCode.SHARED, wide.name, "aten._to_copy has other users")
    on.relu(core)
    assert told(pattern, node)[1] == core.name


def test_a_guard_reads_only_what_is_captured() -> None:
    positive = where(lambda lo: lo > 0, MissCode.RANGE, "{lo} of {hi}")
    with pytest.raises(AssertionError, match=r"read \['hi', 'lo'\]"):

        class Wrong(PatternRule):
            pattern = op(aten.neg.default, X).given(positive)
