"""What `check_rewrite` accepts, and what it says when a check fails."""

from __future__ import annotations

import pytest
import torch
from tests.support.graphs.tiny_models import TwoLinears
from tests.support.toy_rules import DoubleNegation, WrongAbs
from torch import nn

from qfuse.ir.errors import ExtensionError
from qfuse.rewrite.prelude import Exactness, Node, Rewriter, aten
from qfuse.rewrite.scheduled import Phase, ScheduledRules
from qfuse.testing import check_rewrite
from qfuse.zoo import recipes


class Negations(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.neg(torch.neg(x * 2))


NEGATIONS = ScheduledRules((DoubleNegation,), after=Phase.FOLD)


def test_it_counts_rules_and_ops() -> None:
    expect = {"double-negation": 1, "aten.neg": 0, "aten.mul.Tensor": 1}
    found = check_rewrite(Negations(), (torch.randn(3),), rules=[NEGATIONS], expect=expect)

    assert found.fired == {"double-negation": 1}
    assert "aten.mul" in str(found)


def test_it_takes_quantized_modules_with_dynamic_sizes() -> None:
    x = torch.randn(5, 64)
    model = recipes.quantize(TwoLinears().eval(), "w8a16", (x,)).model
    batch = {0: torch.export.Dim("batch", max=64)}
    found = check_rewrite(model, (x,), dynamic_shapes=(batch,), expect={"qfuse.linear": 2})

    assert found.fired["fuse-linear"] == 2


def test_a_rule_that_did_not_fire_is_named_with_its_reasons() -> None:
    class Single(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.neg(x)

    with pytest.raises(AssertionError) as caught:
        check_rewrite(Single(), (torch.randn(3),), rules=[NEGATIONS], expect=["double-negation"])
    text = str(caught.value)
    assert "the rule 'double-negation' was expected at least once, and is there 0 times" in text
    assert "x is not a negation" in text
    assert "aten.neg" in text


def test_an_op_that_is_missing_is_named() -> None:
    with pytest.raises(AssertionError, match=r"the op 'qfuse.linear' was expected 1 times"):
        check_rewrite(Negations(), (torch.randn(3),), expect={"qfuse.linear": 1})


def test_a_rule_that_changes_values_is_found() -> None:
    wrong = ScheduledRules((WrongAbs,), after=Phase.FOLD)
    with pytest.raises(AssertionError, match="the rule wrong-abs changed values by more than"):
        check_rewrite(Negations(), (torch.randn(3),), rules=[wrong], expect=())


class HalfNegation(DoubleNegation):
    """Says that it is exact, and is wrong in the last bits."""

    name = "half-negation"
    exactness = Exactness.EXACT
    proof = Exactness.LOSSY

    def rewrite(self, site: Node, rw: Rewriter) -> None:
        source = site.all_input_nodes[0].all_input_nodes[0]
        rw.replace(site, rw.call(aten.mul.Tensor, source, 1 + 2**-22))


def test_bits_are_compared_if_all_rules_are_exact() -> None:
    rules = [ScheduledRules((HalfNegation,), after=Phase.FOLD)]
    with pytest.raises(AssertionError, match="other bits, though all rules are exact") as caught:
        check_rewrite(Negations(), (torch.randn(64),), rules=rules, expect=())
    assert "half-negation" in str(caught.value)


def test_one_name_and_one_set_of_rules_need_no_list() -> None:
    found = check_rewrite(Negations(), (torch.randn(3),), rules=NEGATIONS, expect="double-negation")
    assert found.fired == {"double-negation": 1}


class Broken(DoubleNegation):
    """Fails."""

    name = "broken"

    def rewrite(self, site: Node, rw: Rewriter) -> None:
        del rw
        site.meta["no such key"]


def test_a_rule_that_fails_is_named() -> None:
    rules = ScheduledRules((Broken,), after=Phase.FOLD)
    with pytest.raises(ExtensionError, match="the rewrite of the rule broken failed: KeyError"):
        check_rewrite(Negations(), (torch.randn(3),), rules=rules, expect=())
