"""Rules of other packages run where they say: after a phase, or in its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.support.toy_rules import DoubleNegation

from qfuse.cost import CostModel, CostProfile
from qfuse.ir.errors import OptionsError
from qfuse.ir.events import Fired, Missed
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.kernels import KernelLibrary
from qfuse.optimize import optimize
from qfuse.pipeline import Extensions, Pipeline
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rewriter, Rule, arguments, aten
from qfuse.rewrite.scheduled import Phase, ScheduledRules
from qfuse.targets import Target
from qfuse.testing import GraphBuilder
from qfuse.testing.quant import QuantizedLinear, per_tensor


class CombineRelu(Rule[Node]):
    """``relu(relu(x))`` becomes ``relu(x)``."""

    name = "combine-relu"
    anchors = (aten.relu.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> Node | Miss:
        inner = arguments(node)["self"]
        assert isinstance(inner, Node)
        if inner.target is not aten.relu.default:
            return Miss(MissCode.PATTERN, inner, "it is not a relu", progress=0)
        return node

    def rewrite(self, site: Node, rw: Rewriter) -> None:
        inner = arguments(site)["self"]
        assert isinstance(inner, Node)
        rw.replace(site, inner)


def program() -> NormalGraph:
    b = GraphBuilder()
    block = QuantizedLinear(b, 8, 8)
    y = block.linear(block.quantized(b.arg("x", torch.float32, "n", 8), per_tensor(2)))
    twice = b.call(aten.neg.default, b.call(aten.neg.default, y))
    return b.done(b.call(aten.relu.default, b.call(aten.relu.default, twice)))


def order(*added: ScheduledRules) -> list[str]:
    done = optimize(program(), RewriteContext("optimize"), added=added)
    return [event.rule for event in done.log.of(Fired)]


@pytest.mark.parametrize("phase", [Phase.FOLD, Phase.MOVE, Phase.MERGE, Phase.SPLIT])
def test_rules_after_a_phase_run_before_fusing(phase: Phase) -> None:
    fired = order(ScheduledRules((DoubleNegation, CombineRelu), after=phase))

    assert fired[:2] == ["double-negation", "combine-relu"]
    assert fired[2:] == ["fuse-linear", "fuse-activation"]


@pytest.mark.parametrize("phase", [Phase.FUSE, Phase.ATTENTION])
def test_rules_after_fusing_run_last(phase: Phase) -> None:
    assert order(ScheduledRules((DoubleNegation, CombineRelu), after=phase)) == [
        "fuse-linear",
        "double-negation",
        "combine-relu",
    ]


@pytest.mark.parametrize("phase", [p for p in Phase if p is not Phase.MERGE])
def test_rules_of_a_group_run_with_its_own(phase: Phase) -> None:
    fired = order(ScheduledRules((DoubleNegation, CombineRelu), group=phase))

    assert set(fired) >= {"double-negation", "fuse-linear"}
    # Together with the fusing rules, what one rule changes is fused by another.
    assert ("fuse-activation" in fired) is (phase is not Phase.ATTENTION)
    assert ("combine-relu" in fired) is (phase is not Phase.FUSE)


def test_without_added_rules_nothing_changes() -> None:
    assert order() == ["fuse-linear"]


def test_the_pipeline_bans_an_added_rule_by_its_name() -> None:
    def pipeline(*without: str) -> Pipeline:
        added = Extensions((ScheduledRules((DoubleNegation,), after=Phase.MOVE),))
        library = KernelLibrary(False, "not needed here")
        cost = CostModel(CostProfile.pinned())
        return Pipeline(Target.for_testing(), cost, library, without=without, extensions=added)

    def rules(without: Sequence[str]) -> list[Any]:
        from qfuse.capture import capture  # noqa: PLC0415

        class Twice(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.neg(torch.neg(x + 1))

        low = pipeline(*without).rewrite(capture(Twice(), (torch.ones(3),)))
        return [e.rule for e in low.log.of(Fired) if e.rule == "double-negation"]

    assert rules(()) == ["double-negation"]
    assert rules(("double-negation",)) == []
    with pytest.raises(OptionsError, match="unknown rewrite 'triple-negation'"):
        pipeline("triple-negation")


def test_misses_of_added_rules_are_logged() -> None:
    b = GraphBuilder()
    y = b.call(aten.neg.default, b.arg("x", torch.float32, 3))
    done = optimize(b.done(y), added=[ScheduledRules((DoubleNegation,), after=Phase.FUSE)])

    assert [miss.rule for miss in done.log.of(Missed)] == ["double-negation"]
