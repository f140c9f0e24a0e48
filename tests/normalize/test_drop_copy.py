from __future__ import annotations

import pytest
import torch

from qfuse.ir.events import MissCode
from qfuse.normalize.drop_copy import DropCopy
from qfuse.rewrite.clone import clone
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import bits_same, random_inputs, run

aten = torch.ops.aten


def calls(program: object) -> list[object]:
    """The ops of a graph, in order."""
    return [n.target for n in program.graph.nodes if n.op == "call_function"]  # type: ignore[attr-defined]


@pytest.mark.numeric
def test_golden_a_copy_inside_the_graph_goes() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "m", 4)
    copy = b.call(aten.clone.default, b.call(aten.neg.default, x))
    program = b.done(b.call(aten.relu.default, copy))
    source = clone(program)

    assert apply_rules(program, [DropCopy()]).fired == {"drop-copy": 1}

    assert calls(program) == [aten.neg.default, aten.relu.default]
    inputs = random_inputs(program, m=3)
    assert bits_same(run(program, inputs), run(source, inputs))


@pytest.mark.parametrize("through", [None, aten.view.default, aten.reshape.default])
def test_refuses_a_copy_that_leaves(through: object) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, 4)
    copy = b.call(aten.clone.default, x)
    out = copy if through is None else b.call(through, copy, [8])  # type: ignore[arg-type]
    program = b.done(out)

    assert DropCopy().match(copy).code is MissCode.SHARED  # type: ignore[union-attr]
    assert not apply_rules(program, [DropCopy()]).modified


def test_refuses_a_copy_that_lays_out_anew() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3, 4)
    turned = b.call(aten.permute.default, x, [1, 0])
    copy = b.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
    program = b.done(b.call(aten.relu.default, b.call(aten.view.default, copy, [12])))

    assert DropCopy().match(copy).code is MissCode.ARGUMENT  # type: ignore[union-attr]
    assert not apply_rules(program, [DropCopy()]).modified
