"""Calls of ops, alternatives and optional operands."""

from __future__ import annotations

import math

import pytest
from tests.support.graphs.board import (
    Board,
    S,
    X,
    Y,
    Z,
    aten,
    hit,
    miss,
    told,
)

from qfuse.ir.events import MissCode
from qfuse.rewrite.pattern import (
    ANY,
    Either,
    Maybe,
    Opt,
    op,
)


def test_arguments_are_compared_by_name_and_value(on: Board) -> None:
    pattern = op(aten.add.Tensor, X, 127)
    hit(pattern, on.add(on.x, 127))
    hit(pattern, on.add(on.x, other=127))
    hit(pattern, on.add(on.x, 127, alpha=1))
    hit(op(aten.add.Tensor, self=X, other=127, alpha=1), on.add(on.x, 127))
    for other in (128, True, on.y, 127.5):
        assert told(pattern, on.add(on.x, other))[0] is MissCode.PATTERN
    assert told(pattern, on.sub(on.x, 127))[0] is MissCode.PATTERN


def test_an_argument_that_is_not_named_has_its_default(on: Board) -> None:
    node = on.add(on.x, on.y, alpha=2)
    assert told(X + Y, node) == (
        MissCode.ARGUMENT,
        node.name,
        "expected aten.add.Tensor with alpha=1, found 2",
    )
    hit(op(aten.add.Tensor, X, Y, alpha=2), node)
    hit(op(aten.add.Tensor, X, Y, alpha=ANY), node)
    amax = op(aten.amax.default, X, [-1])
    hit(amax, on.amax(on.x, [-1]))
    hit(amax, on.amax(on.x, (-1,)))
    assert (
        told(amax, on.amax(on.x, [-1], True))[2]
        == "expected aten.amax with keepdim=False, found True"
    )
    assert told(amax, on.amax(on.x, [0]))[2] == "expected aten.amax with dim=[-1], found [0]"


def test_an_alpha_is_told_after_the_operands(on: Board) -> None:
    pattern = op(aten.abs.default, X).core() + Y
    assert told(pattern, on.add(on.y, on.abs(on.x), alpha=2))[0] is MissCode.ARGUMENT
    assert miss(pattern, on.add(on.y, on.x, alpha=2)).progress == 0


def test_a_pattern_must_name_what_has_no_default() -> None:
    with pytest.raises(AssertionError, match="must say what"):
        op(aten.add.Tensor, X)
    with pytest.raises(AssertionError, match="has no arguments"):
        op(aten.neg.default, X, alpha=1)


def test_lists_and_not_a_number(on: Board) -> None:
    full = op(aten.full_like.default, X, math.nan)
    hit(full, on.full_like(on.x, math.nan))
    assert (
        told(full, on.full_like(on.x, 0.0))[2]
        == "expected aten.full_like with fill_value=nan, found 0.0"
    )
    stack = op(aten.stack.default, [X, Y])
    found = hit(stack, on.stack([on.x, on.y]))
    assert (found[X], found[Y]) == (on.x, on.y)
    assert told(stack, on.stack([on.x]))[0] is MissCode.PATTERN


def test_several_ops_with_the_same_arguments(on: Board) -> None:
    pattern = op([aten.neg.default, aten.abs.default], X)
    hit(pattern, on.neg(on.x))
    hit(pattern, on.abs(on.x))
    assert told(pattern, on.relu(on.x))[2] == "expected aten.neg or aten.abs, found aten.relu"


# Orders, alternatives, what may be missing


def test_commutative_operands_stand_in_any_order(on: Board) -> None:
    pattern = op(aten.neg.default, X) * (Y + S)
    one, other = on.neg(on.x), on.add(on.x, on.y)
    for node in (on.mul(one, other), on.mul(other, one)):
        found = hit(pattern, node)
        assert (found[X], found[Y], found[S]) == (on.x, on.x, on.y)
    assert told(op(aten.neg.default, X) - Y, on.sub(on.x, one))[1] == "x"


def test_an_order_is_undone_where_what_follows_does_not_fit(on: Board) -> None:
    # The first order binds x := the left operand, which the outer sum refutes.
    pattern = op(aten.sub.Tensor, X * Y, X)
    assert hit(pattern, on.sub(on.mul(on.x, on.y), on.x))[Y] is on.y
    assert hit(pattern, on.sub(on.mul(on.x, on.y), on.y))[Y] is on.x
    miss(pattern, on.sub(on.mul(on.x, on.y), on.q))


def test_a_repeated_operand(on: Board) -> None:
    silu = X * op(aten.sigmoid.default, X)
    gate = on.sigmoid(on.x)
    assert hit(silu, on.mul(gate, on.x))[X] is on.x
    twice = on.sigmoid(gate)
    assert hit(silu, on.mul(twice, gate))[X] is gate
    assert told(silu, on.mul(gate, on.y)) == (
        MissCode.PATTERN,
        "x",
        "expected the same value for x, found another placeholder",
    )


def test_an_optional_operand_may_be_missing(on: Board) -> None:
    pattern = op(aten.neg.default, op(aten.round.default, X) + Opt(Z))
    rounded = on.round(on.x)
    assert Z not in hit(pattern, on.neg(rounded))
    assert hit(pattern, on.neg(rounded)).get(Z) is None
    assert hit(pattern, on.neg(on.add(rounded, 3)))[Z] == 3
    assert hit(pattern, on.neg(on.add(on.y, rounded)))[Z] is on.y
    assert told(pattern, on.neg(on.abs(on.x)))[2] == (
        "expected aten.add.Tensor or aten.round, found aten.abs"
    )
    assert told(pattern, on.neg(on.add(rounded, 3, alpha=2)))[0] is MissCode.ARGUMENT


def test_of_alternatives_the_one_that_came_further_is_told(on: Board) -> None:
    shallow = op(aten.neg.default, op(aten.abs.default, X))
    deep = op(aten.neg.default, op(aten.relu.default, op(aten.neg.default, X)))
    node = on.neg(on.relu(on.abs(on.x)))
    for pattern in (Either(shallow, deep), Either(deep, shallow)):
        found = miss(pattern, node)
        assert (found.at.name, found.progress) == ("abs_default", 2)


def test_an_optional_call_is_tried_before_its_operand_or_after(on: Board) -> None:
    node = on.mul(on.neg(on.x), on.y)
    operand = Either(X * Y, op(aten.neg.default, X))
    call = operand * Z
    assert hit(Maybe(call, operand), node)[X] is on.x
    assert hit(plain := Maybe(call, operand, plain_first=True), node)[Y] is on.y
    assert plain.size == 1 + call.size


def test_alternatives_are_undone_too(on: Board) -> None:
    # The first alternative binds y; only the second agrees with what follows.
    inner = Either(op(aten.neg.default, Y), op(aten.neg.default, X))
    pattern = op(aten.sub.Tensor, inner, X)
    found = hit(pattern, on.sub(on.neg(on.x), on.x))
    assert found[X] is on.x
    sum_of_both = op(aten.sub.Tensor, inner, X * Y)
    found = hit(sum_of_both, on.sub(on.neg(on.x), on.mul(on.q, on.x)))
    assert (found[X], found[Y]) == (on.q, on.x)


def test_a_number_may_stand_on_the_left_of_a_pattern(on: Board) -> None:
    hit(0.5 * X, on.mul(on.x, 0.5))
    hit(1 + X, on.add(on.x, 1))
    assert told(0.5 * X, on.mul(on.x, 0.25))[0] is MissCode.PATTERN
