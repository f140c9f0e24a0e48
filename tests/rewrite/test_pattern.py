"""Patterns find what is there in any spelling, and say how far they came where it is not."""

from __future__ import annotations

import math
import time
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph, Node

from qfuse.ir.dtypes import REALS
from qfuse.ir.events import Exactness, MissCode
from qfuse.ir.graph.schema import arguments, is_call
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.views import as_linear, node_of
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.pattern import (
    ANY,
    CAST,
    Arg,
    Capture,
    Const,
    Either,
    Match,
    Num,
    Opt,
    Path,
    Pattern,
    PatternRule,
    Read,
    Scalar,
    Step,
    V,
    cast,
    check,
    explain,
    guard,
    let,
    match,
    op,
    single_use,
    through,
    where,
)
from qfuse.rewrite.pattern.parts import Op
from qfuse.rewrite.pattern.search import same_value
from qfuse.rewrite.rule import Miss
from qfuse.testing.build import GraphBuilder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from qfuse.rewrite.rewriter import Rewriter

aten = torch.ops.aten
X, Y, S = V("x"), V("y"), V("s")
Z = Arg("z")
LOW, HIGH = Num("low"), Num("high")
FLOAT, INT8 = torch.float32, torch.int8


class Board:
    """A builder with two float inputs, an int8 one, and short names for the ops that tests use."""

    def __init__(self) -> None:
        self.b = GraphBuilder()
        self.x = self.b.arg("x", FLOAT, 4, 8)
        self.y = self.b.arg("y", FLOAT, 4, 8)
        self.q = self.b.arg("q", INT8, 4, 8)

    def __getattr__(self, name: str) -> Any:
        overload = "Tensor" if name in {"add", "sub", "mul", "div"} else "default"
        target = getattr(getattr(aten, name), overload)
        return lambda *args, **kwargs: self.b.call(target, *args, **kwargs)

    def to(self, node: Node, dtype: torch.dtype) -> Node:
        return self.b.call(aten._to_copy.default, node, dtype=dtype)


@pytest.fixture
def on() -> Board:
    return Board()


def hit(pattern: Pattern, node: Node) -> Match:
    found = match(pattern, node)
    assert isinstance(found, Match), found
    return found


def miss(pattern: Pattern, node: Node) -> Miss:
    found = match(pattern, node)
    assert isinstance(found, Miss), found
    return found


def told(pattern: Pattern, node: Node) -> tuple[MissCode, str, str]:
    found = miss(pattern, node)
    return found.code, found.at.name, found.reason


# Arguments


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
    assert told(X + Y, node) == (MissCode.ARGUMENT, node.name, "aten.add.Tensor has alpha=2, not 1")
    hit(op(aten.add.Tensor, X, Y, alpha=2), node)
    hit(op(aten.add.Tensor, X, Y, alpha=ANY), node)
    amax = op(aten.amax.default, X, [-1])
    hit(amax, on.amax(on.x, [-1]))
    hit(amax, on.amax(on.x, (-1,)))
    assert told(amax, on.amax(on.x, [-1], True))[2] == "aten.amax has keepdim=True, not False"
    assert told(amax, on.amax(on.x, [0]))[2] == "aten.amax has dim=[0], not [-1]"


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
    assert told(full, on.full_like(on.x, 0.0))[2] == "aten.full_like has fill_value=0.0, not nan"
    stack = op(aten.stack.default, [X, Y])
    found = hit(stack, on.stack([on.x, on.y]))
    assert (found[X], found[Y]) == (on.x, on.y)
    assert told(stack, on.stack([on.x]))[0] is MissCode.PATTERN


def test_several_ops_with_the_same_arguments(on: Board) -> None:
    pattern = op([aten.neg.default, aten.abs.default], X)
    hit(pattern, on.neg(on.x))
    hit(pattern, on.abs(on.x))
    assert told(pattern, on.relu(on.x))[2] == "it is aten.relu, not aten.neg or aten.abs"


# Captures


def test_a_name_is_one_value(on: Board) -> None:
    square = X * X
    hit(square, on.mul(on.x, on.x))
    assert told(square, on.mul(on.x, on.y))[2] == "it is not the %x from before"
    found = hit(op(aten.mul.Tensor, ANY, ANY), on.mul(on.x, on.y))
    assert found.bound == {}


def test_two_reads_of_one_constant_are_one_value(on: Board) -> None:
    value = torch.ones(8)
    one, again, other = on.b.const("w", value), on.b.const("w", value), on.b.const("v", value)
    hit(X * X, on.mul(one, again))
    miss(X * X, on.mul(one, other))


def test_captures_are_typed(on: Board) -> None:
    real = V("r", REALS)
    hit(op(aten.abs.default, real), on.abs(on.x))
    at = on.abs(on.q)
    assert told(op(aten.abs.default, real), at)[:2] == (MissCode.DTYPE, "q")
    assert told(op(aten.abs.default, V("r", FLOAT)), at)[2] == "r is int8, not float32"
    assert told(op(aten.abs.default, V("r", rank=1)), at)[2] == "r is placeholder, of 2 axes"
    assert told(X * V("s", FLOAT), on.mul(on.x, 2))[0] is MissCode.DTYPE
    assert told(op(aten.abs.default, X).giving(FLOAT), at)[:2] == (MissCode.DTYPE, at.name)


def test_numbers_and_constants(on: Board) -> None:
    clamp = op(aten.clamp.default, X, LOW, HIGH)
    found = hit(clamp, on.clamp(on.x, -1, 2.5))
    assert (found[LOW], found[HIGH]) == (-1, 2.5)
    assert told(clamp, on.clamp(on.x, -1))[:2] == (MissCode.NOT_CONSTANT, "clamp_default_1")
    scale = on.b.const("scale", torch.tensor([2.0]))
    half = on.reciprocal(scale)
    known = hit(X * Const("c"), on.mul(on.x, half))[Const("c")]
    assert (known.node, known.value.item()) == (half, 0.5)
    assert told(X * Const("c"), on.mul(on.x, on.y))[0] is MissCode.NOT_CONSTANT
    assert hit(X * Scalar("e"), on.mul(half, on.x))[Scalar("e")] == 0.5
    assert hit(X * Scalar("e"), on.mul(on.x, 3))[Scalar("e")] == 3
    assert hit(X + Z, on.add(on.x, 3))[Z] == 3


def test_typed_views(on: Board) -> None:
    linear = Read("linear", as_linear)
    weight = on.b.const("w", torch.ones(8, 8))
    node = on.linear(on.x, weight)
    assert hit(linear + X, on.add(on.x, node))[linear].weight is weight
    assert told(linear + X, on.add(on.x, on.y))[2] == "it is placeholder, not a linear"


def test_the_sentence_of_a_part_can_be_its_own(on: Board) -> None:
    clamp = op(aten.clamp.default, X, LOW, HIGH)
    text = "{found} leaves the range open"
    pattern = cast(clamp.otherwise(MissCode.RANGE, text), INT8)
    at = on.to(on.neg(on.x), INT8)
    assert told(pattern, at) == (MissCode.RANGE, "neg_default", "aten.neg leaves the range open")


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
    hit(pattern, on.sub(on.mul(on.x, on.y), on.x))
    hit(pattern, on.sub(on.mul(on.x, on.y), on.y))
    miss(pattern, on.sub(on.mul(on.x, on.y), on.q))


def test_a_repeated_operand(on: Board) -> None:
    silu = X * op(aten.sigmoid.default, X)
    gate = on.sigmoid(on.x)
    assert hit(silu, on.mul(gate, on.x))[X] is on.x
    twice = on.sigmoid(gate)
    assert hit(silu, on.mul(twice, gate))[X] is gate
    assert told(silu, on.mul(gate, on.y)) == (MissCode.PATTERN, "x", "it is not the %y from before")


def test_an_optional_operand_may_be_missing(on: Board) -> None:
    pattern = op(aten.neg.default, op(aten.round.default, X) + Opt(Z))
    rounded = on.round(on.x)
    assert Z not in hit(pattern, on.neg(rounded))
    assert hit(pattern, on.neg(rounded)).get(Z) is None
    assert hit(pattern, on.neg(on.add(rounded, 3)))[Z] == 3
    assert hit(pattern, on.neg(on.add(on.y, rounded)))[Z] is on.y
    assert told(pattern, on.neg(on.abs(on.x)))[2] == (
        "it is aten.abs, not aten.add.Tensor or aten.round"
    )
    assert told(pattern, on.neg(on.add(rounded, 3, alpha=2)))[0] is MissCode.ARGUMENT


def test_of_alternatives_the_one_that_came_further_is_told(on: Board) -> None:
    shallow = op(aten.neg.default, op(aten.abs.default, X))
    deep = op(aten.neg.default, op(aten.relu.default, op(aten.neg.default, X)))
    node = on.neg(on.relu(on.abs(on.x)))
    for pattern in (Either(shallow, deep), Either(deep, shallow)):
        found = miss(pattern, node)
        assert (found.at.name, found.progress) == ("abs_default", 2)


def test_alternatives_are_undone_too(on: Board) -> None:
    # The first alternative binds y; only the second agrees with what follows.
    inner = Either(op(aten.neg.default, Y), op(aten.neg.default, X))
    pattern = op(aten.sub.Tensor, inner, X)
    found = hit(pattern, on.sub(on.neg(on.x), on.x))
    assert found[X] is on.x
    sum_of_both = op(aten.sub.Tensor, inner, X * Y)
    found = hit(sum_of_both, on.sub(on.neg(on.x), on.mul(on.q, on.x)))
    assert (found[X], found[Y]) == (on.q, on.x)


# Steps


def view_source(node: Node) -> Node | None:
    return node_of(arguments(node)["self"]) if is_call(node, aten.view.default) else None


VIEWS = Step("view", view_source)


def test_steps_are_looked_through_and_captured(on: Board) -> None:
    path: Capture[Path] = Capture("path")
    pattern = through(op(aten.neg.default, X), VIEWS, CAST, path=path) + Y
    core = on.neg(on.x)
    assert hit(pattern, on.add(core, on.y))[path].steps == ()
    view = on.view(core, [4, 8])
    wide = on.to(view, torch.float64)
    found = hit(pattern, on.add(on.y, wide))
    assert (found[path].base, found[path].top) == (core, wide)
    assert found[path].of(CAST) == (wide,)
    assert found[path].of(VIEWS) == (view,)
    assert found[path].nodes == (core, view, wide)
    other = on.abs(on.x)
    found_not = miss(pattern, on.add(on.y, on.to(on.view(other, [4, 8]), torch.float64)))
    assert (found_not.at, found_not.progress) == (other, 3)


def test_fewer_steps_are_tried_where_all_are_too_many(on: Board) -> None:
    pattern = op(aten.abs.default, through(cast(X, FLOAT), CAST))
    narrow = on.to(on.x, torch.bfloat16)
    once = on.to(narrow, FLOAT)
    assert hit(pattern, on.abs(on.to(once, torch.float64)))[X] is narrow
    assert hit(pattern, on.abs(once))[X] is narrow
    assert told(pattern, on.abs(on.neg(on.x)))[2] == "it is aten.neg, not a cast"


# Guards


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
    assert told(clamp, on.clamp(on.x, 1, 2)) == (MissCode.ZERO_POINT, "x", "%x has no 1")


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
    assert told(pattern, node) == (MissCode.SHARED, wide.name, f"%{wide.name} has other users")
    on.relu(core)
    assert told(pattern, node)[1] == core.name


def test_a_guard_reads_only_what_is_captured() -> None:
    positive = where(lambda lo: lo > 0, MissCode.RANGE, "{lo} of {hi}")
    with pytest.raises(AssertionError, match=r"read \['hi', 'lo'\]"):

        class Wrong(PatternRule):
            pattern = op(aten.neg.default, X).given(positive)


# What is told of a miss


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
    assert explain(miss(chain(), on.to(scaled, INT8))) == (
        "cast(clamp((round({(x / s) | (x * reciprocal(s))}) + z)?, low, high), int8)\n"
        "                  ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ "
        "it is aten.floor, not aten.div.Tensor or aten.mul.Tensor (%floor_default)"
    )
    open_above = on.clamp(on.round(on.div(on.x, on.y)), -8)
    assert explain(miss(chain(), on.to(open_above, INT8))).splitlines()[1] == (
        " " * 63 + "^^^^ high is None, not a number (%clamp_default_1)"
    )
    assert explain(Miss(MissCode.AXIS, on.x, "no pattern")) == "no pattern"


def test_a_long_pattern_is_cut_around_the_caret(on: Board) -> None:
    pattern = op(aten.neg.default, X)
    node = on.neg(on.x)
    for _ in range(40):
        pattern, node = op(aten.neg.default, pattern), on.neg(node)
    text, caret = explain(miss(op(aten.abs.default, pattern), on.abs(on.neg(on.x)))).splitlines()
    assert len(text) < 110
    assert text[caret.index("^") : caret.rindex("^") + 1] == "neg"


def test_the_whole_chain(on: Board) -> None:
    scaled = on.mul(on.reciprocal(on.y), on.x)
    codes = on.clamp(on.add(on.round(scaled), 3), -8, 7)
    found = hit(chain(), on.to(codes, INT8))
    assert (found[X], found[S], found[Z], found[LOW]) == (on.x, on.y, 3, -8)


# The search


def test_the_search_is_linear_without_repeated_captures(on: Board) -> None:
    # Every level has two orders, and the innermost part is missing.
    def sums(depth: int) -> tuple[Pattern, Node]:
        pattern, node = op(aten.relu.default, X), on.x
        for level in range(depth):
            pattern = op(aten.mul.Tensor, pattern, V(f"v{level}"))
            node = on.mul(node, node)
        return pattern, node

    pattern, node = sums(200)
    start = time.process_time()
    assert miss(pattern, node).reason == "it is placeholder, not aten.relu"
    assert time.process_time() - start < 2


def test_a_search_that_multiplies_is_given_up(on: Board) -> None:
    # A sum of products of anything, each in two orders, that ends with a capture of the first.
    pattern, node = V("v0") * V("w0"), on.mul(on.x, on.y)
    for level in range(1, 24):
        part = op(aten.mul.Tensor, V(f"v{level}"), V(f"w{level}"))
        pattern, node = op(aten.sub.Tensor, pattern, part), on.sub(node, on.mul(on.x, on.y))
    pattern, node = op(aten.sub.Tensor, pattern, V("v0")), on.sub(node, on.q)
    start = time.process_time()
    assert miss(pattern, node).reason.startswith("the search for this pattern was given up")
    assert time.process_time() - start < 2


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


# Against a matcher that tries every spelling by itself


def spellings(pattern: Pattern) -> Iterator[tuple[Any, ...]]:
    """Every tree that a pattern of ops, alternatives and captures stands for, in order."""
    if isinstance(pattern, Either):
        for each in pattern.alternatives:
            yield from spellings(each)
    elif isinstance(pattern, Op):
        names, inner = list(pattern.args), list(pattern.args.values())
        for order in [names, names[::-1]] if pattern.ops[0] in COMMUTATIVE else [names]:
            for parts in product(*map(list, map(spellings, inner))):
                yield pattern.ops[0], dict(zip(order, parts, strict=True))
    else:
        yield (pattern.label,)


COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)


def spelled(tree: tuple[Any, ...], value: object, bound: dict[str, object]) -> int | None:
    """Match one tree without a choice; return how many parts matched, ``None`` if all did."""
    if len(tree) == 1:
        known = bound.setdefault(tree[0], value)
        return None if isinstance(value, Node) and same_value(known, value) else len(COUNTED)
    target, args = tree
    if not is_call(value, target):
        return len(COUNTED)
    COUNTED.append(target)
    for name, part in args.items():
        assert isinstance(value, Node)
        failed = spelled(part, arguments(value)[name], bound)
        if failed is not None:
            return failed
        if len(part) == 1:
            COUNTED.append(name)
    return None


COUNTED: list[object] = []


def naive(pattern: Pattern, node: Node) -> dict[str, object] | int:
    """Return the captures of the first spelling that matches, or how far the furthest came."""
    furthest = 0
    for tree in spellings(pattern):
        bound: dict[str, object] = {}
        COUNTED.clear()
        failed = spelled(tree, node, bound)
        if failed is None:
            return bound
        furthest = max(furthest, failed)
    return furthest


def grown(leaves: st.SearchStrategy[Any], unary: Any, binary: Any) -> st.SearchStrategy[Any]:
    return st.recursive(leaves, lambda inner: st.one_of(unary(inner), binary(inner)), max_leaves=5)


UNARY = st.sampled_from([aten.neg.default, aten.relu.default])
BINARY = st.sampled_from([aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor])
PATTERNS = grown(
    st.sampled_from("abc").map(Arg),
    lambda inner: st.builds(op, UNARY, inner),
    lambda inner: st.one_of(
        st.builds(op, BINARY, inner, inner),
        st.builds(Either, inner, inner),
        st.builds(lambda o, a, b: op(o, a, Opt(b)), st.sampled_from(COMMUTATIVE), inner, inner),
    ),
)
TREES = grown(
    st.sampled_from("xy"),
    lambda inner: st.tuples(UNARY, inner),
    lambda inner: st.tuples(BINARY, inner, inner),
)


def built(graph: Graph, tree: Any, known: dict[object, Node]) -> Node:
    """Add a tree, equal parts once: repeated captures are the same node."""
    if tree not in known:
        if isinstance(tree, str):
            known[tree] = graph.placeholder(tree)
        else:
            known[tree] = graph.call_function(
                tree[0], tuple(built(graph, t, known) for t in tree[1:])
            )
    return known[tree]


@pytest.mark.property
@given(PATTERNS, TREES)
def test_it_finds_what_a_naive_matcher_finds(pattern: Pattern, tree: Any) -> None:
    node = built(Graph(), tree, {})
    wanted, found = naive(pattern, node), match(pattern, node)
    if isinstance(wanted, int):
        assert isinstance(found, Miss)
        assert found.progress == wanted
    else:
        assert isinstance(found, Match)
        assert found.bound == wanted


def test_a_pure_cast_is_a_cast(on: Board) -> None:
    node = on.to(on.x, INT8)
    assert cast_source(node) is on.x
    assert told(cast(X, INT8), on.to(on.x, torch.uint8))[2] == "it is uint8, not int8"
    assert told(cast(X, INT8), on.neg(on.x))[2] == "it is aten.neg, not a cast"
