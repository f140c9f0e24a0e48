"""Small rules, right and wrong ones, to drive the engine with."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch._ops import OpOverload
from torch.fx import Node

from qfuse.cost.model import CostModel
from qfuse.ir.events import Exactness, MissCode
from qfuse.ir.graph.schema import arguments
from qfuse.ir.ops.views import node_of
from qfuse.rewrite.rewriter import Rewriter
from qfuse.rewrite.rule import Miss, Rule

aten = torch.ops.aten


class DoubleNegation(Rule["Node"]):
    """``neg(neg(x))`` is ``x``."""

    name = "double-negation"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.neg.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> Node | Miss:
        inner = node_of(arguments(node)["self"])
        if inner.target is not aten.neg.default:
            return Miss(MissCode.PATTERN, inner, "{} is not a negation", inner.name, progress=2)
        return node

    def rewrite(self, site: Node, rw: Rewriter) -> None:
        inner = node_of(arguments(site)["self"])
        rw.replace(site, node_of(arguments(inner)["self"]))


class NegToMul(Rule["Node"]):
    """``neg(x)`` becomes ``x * -1``."""

    name = "neg-to-mul"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.neg.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> Node | Miss:
        return node

    def rewrite(self, site: Node, rw: Rewriter) -> None:
        rw.replace(site, rw.call(aten.mul.Tensor, arguments(site)["self"], -1))


class MulToNeg(Rule["Node"]):
    """``x * -1`` becomes ``neg(x)``: together with NegToMul this never ends."""

    name = "mul-to-neg"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.mul.Tensor,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> Node | Miss:
        return node

    def rewrite(self, site: Node, rw: Rewriter) -> None:
        rw.replace(site, rw.call(aten.neg.default, arguments(site)["self"]))


class WrongAbs(Rule["Node"]):
    """``neg(x)`` becomes ``abs(x)``, which is wrong where x is positive."""

    name = "wrong-abs"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.neg.default,)
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> Node | Miss:
        return node

    def rewrite(self, site: Node, rw: Rewriter) -> None:
        rw.replace(site, rw.call(aten.abs.default, arguments(site)["self"]))


class BrokenNeg(Rule["Node"]):
    """Breaks its contract in one of two ways, after it has edited the graph."""

    name = "broken-neg"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.neg.default,)
    exactness = Exactness.EXACT

    def __init__(self, how: str) -> None:
        self._how = how
        self.calls = 0

    def match(self, node: Node) -> Node | Miss:
        return node

    def rewrite(self, site: Node, rw: Rewriter) -> None:
        self.calls += 1
        source = arguments(site)["self"]
        rw.replace(site, rw.call(aten.mul.Tensor, source, -1))
        if self._how == "call":
            rw.call(aten.permute.default, source, [0, 1, 2])
        else:
            rw.replace(site, rw.call(aten._to_copy.default, source, dtype=torch.float64))


class CostlyRelu(Rule["Node"]):
    """Legal, but it never pays."""

    name = "costly-relu"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.relu.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> Node | Miss:
        return node

    def gain(self, site: Node, cost: CostModel) -> float | None:
        del site, cost
        return -2e-6

    def rewrite(self, site: Node, rw: Rewriter) -> None:
        rw.replace(site, rw.call(aten.clamp_min.default, arguments(site)["self"], 0))


class BlindRule(Rule["Node"]):
    """A rule that did not foresee the graph."""

    name = "blind"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.neg.default, aten.relu.default)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> Node | Miss:
        raise AssertionError(f"did not foresee {node.name}")

    def rewrite(self, site: Node, rw: Rewriter) -> None:
        raise NotImplementedError
