"""Patterns see every argument."""

from __future__ import annotations

import math

import torch
from torch.fx import Graph, Node

from qfuse.normalize.match.pattern import ANY, Call, Maybe, Var, find

aten = torch.ops.aten
X = Var("x")


def node(op: torch._ops.OpOverload, *args: object, **kwargs: object) -> Node:
    """A call, of an input where an argument is missing."""
    graph = Graph()
    x = graph.placeholder("x")
    given = tuple(x if a is X else a for a in args)
    return graph.call_function(op, given, kwargs)  # type: ignore[arg-type]


def test_arguments_are_compared_by_name_and_value() -> None:
    pattern = Call(aten.add.Tensor, {"self": X, "other": 127})
    assert find(pattern, node(aten.add.Tensor, X, 127)) is not None
    assert find(pattern, node(aten.add.Tensor, X, other=127)) is not None
    assert find(pattern, node(aten.add.Tensor, X, 127, alpha=1)) is not None
    assert find(pattern, node(aten.add.Tensor, X, 128)) is None
    assert find(pattern, node(aten.add.Tensor, X, True)) is None
    assert find(pattern, node(aten.add.Tensor, X, X)) is None
    assert find(pattern, node(aten.sub.Tensor, X, 127)) is None


def test_an_argument_that_is_not_named_has_its_default() -> None:
    pattern = Call(aten.add.Tensor, {"self": X, "other": 127})
    assert find(pattern, node(aten.add.Tensor, X, 127, alpha=2)) is None
    assert find(pattern, 127) is None


def test_a_name_is_one_value() -> None:
    twice = Call(aten.add.Tensor, {"self": X, "other": X})
    found = find(twice, node(aten.add.Tensor, X, X))
    assert found is not None
    assert found.keys() == {"x"}
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert find(twice, graph.call_function(aten.add.Tensor, (x, y))) is None
    anything = Call(aten.add.Tensor, {"self": ANY, "other": ANY})
    assert find(anything, graph.call_function(aten.add.Tensor, (x, y))) == {}


def test_lists_and_not_a_number() -> None:
    amax = Call(aten.amax.default, {"self": X, "dim": [-1]})
    assert find(amax, node(aten.amax.default, X, [-1])) is not None
    assert find(amax, node(aten.amax.default, X, [-1], True)) is None
    full = Call(aten.full_like.default, {"self": X, "fill_value": math.nan})
    assert find(full, node(aten.full_like.default, X, math.nan)) is not None
    assert find(full, node(aten.full_like.default, X, 0.0)) is None


def test_what_may_be_missing() -> None:
    cast = Call(aten._to_copy.default, {"self": X, "dtype": torch.float32})
    pattern = Call(aten.abs.default, {"self": Maybe(cast)})
    graph = Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten._to_copy.default, (x,), {"dtype": torch.float32})
    z = graph.call_function(aten._to_copy.default, (x,), {"dtype": torch.float64})
    assert find(pattern, graph.call_function(aten.abs.default, (y,))) == {"x": x}
    assert find(pattern, graph.call_function(aten.abs.default, (x,))) == {"x": x}
    assert find(pattern, graph.call_function(aten.abs.default, (z,))) == {"x": z}


def test_what_is_missing_has_its_type() -> None:
    cast = Call(aten._to_copy.default, {"self": X, "dtype": torch.float32})
    pattern = Call(aten.abs.default, {"self": Maybe(cast, torch.float32)})
    graph = Graph()
    x = graph.placeholder("x")
    outer = graph.call_function(aten.abs.default, (x,))
    for dtype, fits in ((torch.float32, True), (torch.bfloat16, False)):
        x.meta["val"] = torch.empty(2, dtype=dtype)
        assert (find(pattern, outer) is not None) == fits
