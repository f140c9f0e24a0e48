from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.values import bits_same
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.optimize.merge.merge_linears import MergeLinears
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import RewriteContext
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten


def linears(b: GraphBuilder, rows: int | str = 6) -> list[Node]:
    """Two linears on one input whose sums are exact, so that a wider product has the same bits."""
    x = b.call(aten.round.default, b.arg("x", torch.float32, rows, 8))
    weights = [torch.randint(-3, 4, (8, 8)).float() for _ in range(2)]
    return [b.call(aten.linear.default, x, b.const(f"w{i}", w)) for i, w in enumerate(weights)]


def merged(program: NormalGraph, **sizes: int) -> dict[str, int]:
    source = clone(program)
    result = MergeLinears().run(program, RewriteContext("optimize"))
    inputs = random_inputs(program, **sizes)
    new, old = run(program, inputs), run(source, inputs)
    assert bits_same(new, old)
    assert [t.stride() for t in new] == [t.stride() for t in old]
    return dict(result.fired)


SPLITS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.split.Tensor, (4, -1)),
    (aten.split_with_sizes.default, ([2, 3, 3], -1)),
    (aten.split.Tensor, (3, 1)),
]


@pytest.mark.numeric
@pytest.mark.parametrize(("op", "args"), SPLITS)
@pytest.mark.parametrize("rows", [6, "n"])
def test_linears_that_are_split_merge(op: Any, args: tuple[Any, ...], rows: int | str) -> None:
    b = GraphBuilder()
    outs = []
    for y in linears(b, rows):
        parts = b.call(op, y, *args)
        count = len(parts.meta["val"])
        turned = [b.call(aten.neg.default, b.item(parts, i)) for i in range(count - 1)]
        outs.append(b.call(aten.cat.default, [*turned, b.item(parts, count - 1)], -1))
    assert merged(b.done(*outs), n=6) == {"merge-linears": 1}


@pytest.mark.numeric
def test_views_of_parts_are_rebuilt_and_a_part_that_leaves_is_a_copy() -> None:
    b = GraphBuilder()
    outs = []
    for y in linears(b):
        parts = b.call(aten.split.Tensor, y, 4, 0)
        first, second = (b.item(parts, i) for i in range(2))
        # The rows of a part of the wide result are not adjacent, so this view becomes a copy.
        outs += [b.call(aten.abs.default, b.call(aten.view.default, first, [32])), second]
    assert merged(b.done(*outs)) == {"merge-linears": 1}


def test_refuses_a_view_of_a_part_that_depends_on_memory() -> None:
    b = GraphBuilder()
    outs = []
    for y in linears(b):
        part = b.item(b.call(aten.split.Tensor, y, 4, -1), 0)
        strided = b.call(aten.as_strided.default, part, [3, 2], [16, 1])
        outs.append(b.call(aten.neg.default, strided))
    result = MergeLinears().run(b.done(*outs), RewriteContext("optimize"))
    assert not result.fired
    assert {miss.code for _, miss in result.misses} == {MissCode.ORDER}
