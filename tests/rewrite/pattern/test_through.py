"""Steps between the parts of a pattern."""

from __future__ import annotations

import torch
from tests.support.graphs.board import (
    FLOAT,
    INT8,
    Board,
    X,
    Y,
    aten,
    hit,
    miss,
    told,
)
from torch.fx import Node

from qfuse.ir.graph.schema import arguments, is_call
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.views import node_of
from qfuse.rewrite.pattern import (
    CAST,
    Capture,
    Path,
    Step,
    cast,
    op,
    through,
)


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
    assert told(pattern, on.abs(on.neg(on.x)))[2] == "expected a cast, found aten.neg"


def test_a_pure_cast_is_a_cast(on: Board) -> None:
    node = on.to(on.x, INT8)
    assert cast_source(node) is on.x
    assert told(cast(X, INT8), on.to(on.x, torch.uint8))[2] == "expected int8, found uint8"
    assert told(cast(X, INT8), on.neg(on.x))[2] == "expected a cast, found aten.neg"
