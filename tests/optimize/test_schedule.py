from __future__ import annotations

import pytest
import torch
from tests.support.cases.propagate import Graph, priced, spec_of, steps
from tests.support.sources.dialects import equal_but_for_nan

from qfuse.ir.events import MissCode, Missed
from qfuse.ir.graph.stage_graph import place_of
from qfuse.optimize.schedule import MOVING_RULES, move, optimize
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import RewriteContext
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import QuantizedLinear, per_tensor
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten

pytestmark = pytest.mark.numeric


def attention(g: Graph) -> list[torch.fx.Node]:
    """Queries, keys and values of one tensor, each with a dynamic quantize of its own view."""
    spec = spec_of(1, None)
    reals = []
    for _ in range(3):
        flat = g.call(aten.view.default, g.x, [-1, 8])
        params = g.choose(flat, (1, None))
        reals.append(g.dequantize(g.quantize(flat, spec, params), spec, params))
    return reals


@pytest.mark.parametrize("m", [1, 5])
def test_quantizes_of_separate_views_become_one_above_them(m: int) -> None:
    g = Graph("m", 6, 8)
    program = g.done(*attention(g))
    source = clone(program)
    move(program, priced())

    inputs = random_inputs(program, m=m)
    for new, old in zip(run(program, inputs), run(source, inputs), strict=True):
        assert equal_but_for_nan(new, old)
    made = [step.partition("[")[0] for step in steps(program)]
    assert (made.count("quantize"), made.count("dequantize")) == (1, 1)
    (q,) = [n for n in program.graph.nodes if n.target is torch.ops.qfuse.quantize.default]
    assert q.args[0].name == "x"


def test_quantize_and_dequantize_meet_between_movements_and_cancel() -> None:
    g = Graph(2, 6, 8)
    above, below = spec_of(None, None, None), spec_of(None, None)
    scale, zero = torch.tensor([[0.0123]]), torch.tensor([[5]], dtype=torch.int32)
    high = g.constant(scale[None], "scale"), g.constant(zero[None], "zero")
    low = g.constant(scale, "scale"), g.constant(zero, "zero")
    real = g.dequantize(g.quantize(g.x, above, high), above, high)
    turned = g.call(aten.permute.default, real, [1, 0, 2])
    flat = g.call(aten.reshape.default, turned, [12, 8])
    program = g.done(g.dequantize(g.quantize(flat, below, low), below, low))
    source = clone(program)

    assert move(program, priced())["cancel-quantize"] == 1
    assert steps(program) == [
        *("quantize[2, 6, 8]", "permute[6, 2, 8]", "reshape[12, 8]"),
        *("dequantize[12, 8]", "neg[12, 8]"),
    ]
    assert not move(program, priced())
    inputs = random_inputs(program)
    assert equal_but_for_nan(run(program, inputs)[0], run(source, inputs)[0])


def test_what_is_refused_is_told_once() -> None:
    g = Graph(2, 6, 8)
    blocked = g.call(aten.view.default, g.x, [12, 8])
    spec = spec_of(4, None)
    bad = g.quantize(blocked, spec, g.params(blocked, spec))
    program = g.done(bad, *attention(g))
    move(program, priced())

    assert [miss.rule for miss in program.log.of(Missed)].count("lift-quantize") == 1


def test_every_moving_rule_has_a_name_of_its_own() -> None:
    assert len({rule.name for rule in MOVING_RULES}) == len(MOVING_RULES)


def linears_and_relus() -> tuple[GraphBuilder, list[torch.fx.Node]]:
    """Two quantized linears in a row, each with a relu; that of the second cannot be fused."""
    b = GraphBuilder()
    x = QuantizedLinear(b, 4, 8).quantized(b.arg("x", torch.float32, 3, 8), per_tensor(2))
    first = b.call(aten.relu.default, QuantizedLinear(b, 4, 8).linear(x, "first"))
    y = QuantizedLinear(b, 5, 4).linear(first, "second")
    return b, [b.call(aten.relu.default, y), y]


def test_only_misses_at_nodes_that_are_left_are_logged_and_each_once() -> None:
    b, outs = linears_and_relus()
    program = b.done(*outs)
    place = place_of(outs[0])
    earlier = Missed("normalize", "a-rule", MissCode.SHARED, "shared", place, place, 1)
    program.log.add(earlier)
    done = optimize(program)

    assert done.log.events[0] == earlier, "what another stage has logged stays"
    missed = [miss for miss in done.log.of(Missed) if miss.stage == "optimize"]
    assert {miss.anchor.node for miss in missed} <= {node.name for node in done.graph.nodes}
    assert "relu" in {miss.anchor.op.rpartition(".")[2] for miss in missed}
    assert len(missed) == len(set(missed))


def test_a_caller_that_collects_misses_gets_those_that_are_left() -> None:
    b, outs = linears_and_relus()
    kept: list[Missed] = []
    done = optimize(b.done(*outs), RewriteContext("optimize", missed=kept))

    assert not done.log.of(Missed)
    assert kept
    assert {miss.anchor.node for miss in kept} <= {node.name for node in done.graph.nodes}
