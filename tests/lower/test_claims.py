"""Backends claim ops: the first wins, it is recorded, and the rest is expanded bit for bit."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.support.pairs import every_pair
from torch._ops import OpOverload
from torch.fx import Node

from qfuse.ir.errors import ExtensionError, VerifyError
from qfuse.ir.events import Left, Lowered
from qfuse.ir.graph.stage_graph import CLAIM_META, NormalGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.linear import as_fused_linear
from qfuse.ir.refusal import Refusal
from qfuse.ir.stages.verify import verify
from qfuse.lower import claim_ops
from qfuse.optimize import optimize
from qfuse.report import Report
from qfuse.rewrite.clone import clone
from qfuse.rewrite.prelude import aten
from qfuse.testing import GraphBuilder, battery, random_inputs, run
from qfuse.testing.quant import QuantizedLinear, per_tensor
from qfuse.testing.source import equal_but_for_nan


@dataclass
class Claims:
    """Claims every op that it supports, or answers otherwise."""

    name: str
    supported_ops: Collection[OpOverload] = (ops.linear,)
    answer: Any = True
    asked: list[str] = field(default_factory=list)

    def is_legal(self, node: Node) -> Any:
        """Record the question."""
        self.asked.append(node.name)
        return self.answer


def two_linears() -> NormalGraph:
    b = GraphBuilder()
    block = QuantizedLinear(b, 8, 8)
    x = block.quantized(b.arg("x", torch.float32, "n", 8), per_tensor(2))
    y = block.quantized(block.linear(x, "w"), per_tensor(2), "y")
    return b.done(b.call(aten.sigmoid.default, block.linear(y, "v")))


def test_the_first_claim_wins_and_is_recorded() -> None:
    first, second = Claims("first", answer=Refusal("it is too wide")), Claims("second")
    low = claim_ops(optimize(two_linears()), [first, second])
    linears = low.graph.find_nodes(op="call_function", target=ops.linear)
    report = Report(tuple(low.log))

    assert len(linears) == 2
    assert {node.meta[CLAIM_META] for node in linears} == {"second"}
    assert first.asked == second.asked == [node.name for node in linears]
    assert {e.losers for e in low.log.of(Lowered) if e.kernel == "second"} == {
        (("first", "it is too wide"),)
    }
    assert {report.claims[node.name] for node in linears} == {"second"}
    assert report.kernels == {"second": 2}
    text = report.text(verbose=True)
    assert "first: [1]" in text
    assert "[1] it is too wide" in text


def test_another_backend_is_not_asked_after_the_first_claim() -> None:
    first, second = Claims("first"), Claims("second")
    claim_ops(optimize(two_linears()), [first, second])

    assert len(first.asked) == 2
    assert second.asked == []


def test_ops_of_aten_can_be_claimed_or_refused() -> None:
    program = optimize(two_linears())
    low = claim_ops(clone(program), [Claims("npu", (aten.sigmoid.default,))])
    (sigmoid,) = low.graph.find_nodes(op="call_function", target=aten.sigmoid.default)
    assert sigmoid.meta[CLAIM_META] == "npu"

    refused = claim_ops(program, [Claims("npu", (aten.sigmoid.default,), Refusal("no table"))])
    report = Report(tuple(refused.log))
    assert [(e.kernel, e.losers) for e in report.refused] == [("torch", (("npu", "no table"),))]
    # It was fused into the linear, and offered when that was expanded.
    assert len(report.expanded) == 2
    assert "[1] no table" in report.text(verbose=True)


def test_results_belong_to_whoever_computes_them() -> None:
    b = GraphBuilder()
    block = QuantizedLinear(b, 8, 8)
    y = b.call(aten.silu.default, b.arg("x", torch.float32, 4, 8))
    program = optimize(b.done(block.stored(y, per_tensor(2))[0]))
    low = claim_ops(program, [Claims("npu", (ops.activation,))])

    claimed = [node for node in low.graph.nodes if CLAIM_META in node.meta]
    assert [str(node.target) for node in claimed] == [
        "qfuse.activation.default",
        "<built-in function getitem>",
    ]
    assert len(low.log.of(Lowered)) == 1


def cases() -> list[Any]:
    """The battery; without ``thorough``, every pair of what the names of its cases combine."""
    found = {tuple(re.split(r": | x | -> | \| |, ", case.name)): case for case in battery()}
    kept = every_pair(list(found))
    marks = [() if row in kept else (pytest.mark.thorough,) for row in found]
    return [
        pytest.param(case, id=case.name, marks=mark)
        for case, mark in zip(found.values(), marks, strict=True)
    ]


@pytest.mark.numeric
@pytest.mark.parametrize("case", cases())
def test_what_is_not_claimed_is_expanded_bit_for_bit(case: Any) -> None:
    program = optimize(case.program())
    low = claim_ops(clone(program), [Claims("npu", (ops.linear,), Refusal("not today"))])

    assert not [n for n in low.graph.nodes if getattr(n.target, "namespace", "") == "qfuse"]
    for sizes in case.sizes:
        inputs = random_inputs(program, **sizes)
        for new, old in zip(run(low, inputs), run(program, inputs), strict=True):
            assert equal_but_for_nan(old, new)


@pytest.mark.numeric
def test_the_quantizes_of_an_expanded_op_can_be_claimed() -> None:
    program = optimize(two_linears())
    low = claim_ops(clone(program), [Claims("npu", (ops.quantize, ops.dequantize))])
    claimed = [str(n.target) for n in low.graph.nodes if CLAIM_META in n.meta]
    inputs = random_inputs(program, n=5)

    # The input; then operands of both linears, and the result of the first.
    assert claimed.count("qfuse.quantize.default") == 2
    assert claimed.count("qfuse.dequantize.default") == 4
    assert len(low.graph.find_nodes(op="call_function", target=aten.linear.default)) == 2
    for new, old in zip(run(low, inputs), run(program, inputs), strict=True):
        assert torch.equal(new, old)


@pytest.mark.parametrize("answer", [None, False, 1, "no"])
def test_an_answer_that_is_neither_is_an_error(answer: object) -> None:
    with pytest.raises(ExtensionError, match="is_legal of the backend 'npu' returned") as caught:
        claim_ops(optimize(two_linears()), [Claims("npu", answer=answer)])
    assert "return True, or a qfuse.ir.refusal.Refusal" in str(caught.value)


def test_a_backend_that_fails_is_named() -> None:
    class Fails(Claims):
        def is_legal(self, node: Node) -> Any:
            return node.meta["no such key"]

    with pytest.raises(ExtensionError, match="is_legal of the backend 'npu' failed") as caught:
        claim_ops(optimize(two_linears()), [Fails("npu")])
    assert "qfuse.linear" in str(caught.value)


def test_quantizes_that_stay_have_a_reason() -> None:
    low = claim_ops(optimize(two_linears()), [Claims("npu")])
    (left,) = low.log.of(Left)

    assert left.reason == "it quantizes an input of the model; it feeds 1 quantized op"


@pytest.mark.numeric
def test_large_channels_last_images_are_pooled() -> None:
    b = GraphBuilder()
    block = QuantizedLinear(b, 8, 8)
    x = b.arg("x", torch.float32, 1, 3, 20, 20, order=(0, 2, 3, 1))
    real = block.quantized(x, per_tensor(4))
    pooled = b.call(aten.max_pool2d.default, real, [3, 3])
    program = optimize(b.done(b.call(aten.neg.default, pooled)))
    low = claim_ops(program, [Claims("npu")])
    (value,) = (t.contiguous(memory_format=torch.channels_last) for t in random_inputs(low))

    (y,) = run(low, [value])
    assert y.shape == (1, 3, 6, 6)


def test_a_lowered_graph_has_only_claimed_ops() -> None:
    low = claim_ops(optimize(two_linears()), [Claims("npu")])
    verify(low)
    (first, _) = low.graph.find_nodes(op="call_function", target=ops.linear)
    assert as_fused_linear(first) is not None
    del first.meta[CLAIM_META]

    with pytest.raises(VerifyError, match="does not belong to this stage"):
        verify(low)


@dataclass
class Edits(Claims):
    """Edits the graph when it is asked."""

    how: str = "erase"

    def is_legal(self, node: Node) -> Any:
        """Edit the graph."""
        if self.how == "retarget":
            node.target = ops.matmul
        elif self.how == "insert":
            with node.graph.inserting_before(node):
                node.graph.call_function(aten.neg.default, (node.args[0],))
        elif self.how == "elsewhere":
            (output,) = node.graph.find_nodes(op="output")
            output.args = ((node.args[0],),)
        return super().is_legal(node)


@pytest.mark.parametrize("how", ["retarget", "insert", "elsewhere"])
def test_a_backend_that_edits_the_graph_is_named(how: str) -> None:
    calm = Claims("calm", (aten.sigmoid.default,))
    with pytest.raises(ExtensionError, match=r"of the backend '.*hasty' edits the graph") as caught:
        claim_ops(optimize(two_linears()), [calm, Edits("hasty", how=how)])
    assert "move the edit to a rule" in str(caught.value)
