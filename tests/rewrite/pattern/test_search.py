"""The search is bounded, and finds what a naive matcher finds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.graphs.board import (
    Board,
    X,
    aten,
    miss,
)
from torch.fx import Graph, Node

from qfuse.ir.graph.schema import arguments, is_call
from qfuse.rewrite.pattern import (
    Arg,
    Either,
    Match,
    Opt,
    Pattern,
    V,
    match,
    op,
)
from qfuse.rewrite.pattern.parts import OpPattern
from qfuse.rewrite.pattern.search import same_value
from qfuse.rewrite.rule import Miss


def test_the_search_is_linear_without_repeated_captures(on: Board) -> None:
    # Every level has two orders, and the innermost part is missing: a search that tried all would
    # be given up, with that reason.
    def sums(depth: int) -> tuple[Pattern, Node]:
        pattern, node = op(aten.relu.default, X), on.x
        for level in range(depth):
            pattern = op(aten.mul.Tensor, pattern, V(f"v{level}"))
            node = on.mul(node, node)
        return pattern, node

    pattern, node = sums(200)
    assert miss(pattern, node).reason == "expected aten.relu, found placeholder"


def test_a_search_that_multiplies_is_given_up(on: Board) -> None:
    # A sum of products of anything, each in two orders, that ends with a capture of the first.
    pattern, node = V("v0") * V("w0"), on.mul(on.x, on.y)
    for level in range(1, 24):
        part = op(aten.mul.Tensor, V(f"v{level}"), V(f"w{level}"))
        pattern, node = op(aten.sub.Tensor, pattern, part), on.sub(node, on.mul(on.x, on.y))
    pattern, node = op(aten.sub.Tensor, pattern, V("v0")), on.sub(node, on.q)
    assert miss(pattern, node).reason.startswith("the search for this pattern was given up")


# Against a matcher that tries every spelling by itself


def spellings(pattern: Pattern) -> Iterator[tuple[Any, ...]]:
    """Every tree that a pattern of ops, alternatives and captures stands for, in order."""
    if isinstance(pattern, Either):
        for each in pattern.alternatives:
            yield from spellings(each)
    elif isinstance(pattern, OpPattern):
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
        assert found.progress == found.held == wanted
        assert found.held < found.conditions
    else:
        assert isinstance(found, Match)
        assert found.bound == wanted
