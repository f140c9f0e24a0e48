"""Moving, combining and merging do as much per node in a large graph as in a small one.

Work is counted, not timed: looks at nodes by rules, nodes made, and nodes that have to be looked at
again after a rewrite.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Node

from qfuse.cost import CostModel, CostProfile
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.ops import library as ops
from qfuse.optimize.merge.cse import Combine
from qfuse.optimize.merge.merge_linears import MergeLinears
from qfuse.optimize.schedule import MOVING_RULES, SPLIT_RULES, move, sink_splits
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.rewriter import Rewriter
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_tensor
from qfuse_bench.workloads.movement_graphs import KINDS, calls_in, movement_graph

aten = torch.ops.aten
pytestmark = pytest.mark.slow

SMALL, LARGE = 100, 400


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts of what is done from now on."""
    done: Counter[str] = Counter()

    def counted(what: str, method: Callable[..., Any], size: Callable[[Any], int]) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            done[what] += size(result)
            return result

        return wrapper

    def one(result: object) -> int:
        del result
        return 1

    for rule in (*MOVING_RULES, *SPLIT_RULES):
        monkeypatch.setattr(rule, "match", counted("match", rule.match, one))
    for made in ("call", "replay", "constant"):
        monkeypatch.setattr(Rewriter, made, counted("make", getattr(Rewriter, made), one))
    touched = counted("touch", Rewriter.commit, lambda lists: len(lists[0]) + len(lists[1]))
    monkeypatch.setattr(Rewriter, "commit", touched)
    return done


def phase(program: NormalGraph, work: Counter[str]) -> dict[str, float]:
    """What the phase does, per call in the graph."""
    calls = calls_in(program)
    work.clear()
    context = RewriteContext("optimize", CostModel(CostProfile.pinned()))
    Combine().run(program, context)
    move(program, context)
    MergeLinears().run(program, context)
    sink_splits(program, context)
    return {what: count / calls for what, count in work.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_work_per_node_does_not_grow_with_the_graph(kind: str, work: Counter[str]) -> None:
    small, large = (phase(movement_graph(kind, calls), work) for calls in (SMALL, LARGE))

    assert small["match"] > 0
    assert large == pytest.approx(small, rel=0.05)


def quantized(b: GraphBuilder, x: Node, name: str) -> Node:
    spec = per_tensor(len(x.meta["val"].shape))
    scale = b.const(name, torch.full([1] * spec.rank, 0.02))
    q = b.call(ops.quantize, x, scale, None, str(spec))
    return b.call(ops.dequantize, q, scale, None, str(spec))


def one_value_with_many_readers(users: int) -> NormalGraph:
    """Every reader is a view that is quantized."""
    b = GraphBuilder()
    x = b.call(aten.relu.default, b.arg("x", torch.float32, 8, 8))
    outs = []
    for index in range(users):
        part = b.call(aten.view.default, x, [4, 16])
        outs.append(b.call(aten.neg.default, quantized(b, part, f"s{index}")))
    return b.done(*outs)


def many_values_with_one_scale(values: int) -> NormalGraph:
    """Nothing is shared but the bits of the scale, of which there are many copies."""
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 8, 8)
    for index in range(values):
        x = b.call(aten.neg.default, quantized(b, x, f"s{index}"))
    return b.done(x)


def one_split_with_many_parts(parts: int) -> NormalGraph:
    """Every part of a dequantize is quantized again."""
    b = GraphBuilder()
    x = quantized(b, b.arg("x", torch.float32, 8, parts), "whole")
    split = b.call(aten.split_with_sizes.default, x, [1] * parts, 1)
    outs = []
    for index in range(parts):
        again = quantized(b, b.item(split, index), f"s{index}")
        outs.append(b.call(aten.neg.default, again))
    return b.done(*outs)


def one_join_of_many_parts(parts: int) -> NormalGraph:
    """Every part is a dequantize, and the whole is quantized again."""
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 8, 8)
    pieces = [quantized(b, b.call(aten.neg.default, x), f"s{i}") for i in range(parts)]
    whole = quantized(b, b.call(aten.cat.default, pieces, 1), "whole")
    return b.done(b.call(aten.neg.default, whole))


def one_long_chain(length: int) -> NormalGraph:
    """A dequantize above many movements, and a quantize below them."""
    b = GraphBuilder()
    x = quantized(b, b.arg("x", torch.float32, 8, 8), "above")
    for _ in range(length):
        x = b.call(aten.transpose.int, x, 0, 1)
    return b.done(b.call(aten.neg.default, quantized(b, x, "below")))


@pytest.mark.parametrize(
    "build",
    [
        one_value_with_many_readers,
        many_values_with_one_scale,
        one_split_with_many_parts,
        one_join_of_many_parts,
        one_long_chain,
    ],
)
def test_work_per_node_does_not_grow_with_readers_parts_and_chains(
    build: Callable[[int], NormalGraph], work: Counter[str]
) -> None:
    small, large = (phase(build(count), work) for count in (30, 120))

    assert set(small) == set(large)
    for what in small:
        assert large[what] <= 1.25 * small[what], what
