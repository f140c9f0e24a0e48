"""One more op that quantization changes places with takes a class and a line."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.propagate import Graph, applied, only_miss, spec_of, steps

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops.qdq import Dequantize, Quantize
from qfuse.ir.ops.views import node_of
from qfuse.optimize.commute.base import Commutes, Crossing, given
from qfuse.optimize.commute.registry import COMMUTING, commuting
from qfuse.optimize.propagate.lift_quantize import LiftQuantize
from qfuse.optimize.propagate.sink_dequantize import SinkDequantize
from qfuse.rewrite.prelude import Miss, Node, arguments, aten


@dataclass(frozen=True, slots=True)
class Triangle(Commutes):
    """``tril``, which writes zeros: quantized, these are zeros if there is no zero point."""

    ops = (aten.tril.default,)

    node: Node
    source: Node

    @classmethod
    def of(cls, node: Node) -> Triangle | None:
        """View a triangle."""
        return cls(node, node_of(arguments(node)["self"])) if node.target in cls.ops else None

    def lift(self, quantize: Quantize) -> Crossing | Miss:
        """Quantize what is cut."""
        return self._across(quantize, self.source)

    def sink(self, operands: tuple[Dequantize, ...]) -> Crossing | Miss:
        """Cut quantized values."""
        return self._across(operands[0], self.node)

    def _across(self, op: Quantize | Dequantize, end: Node) -> Crossing | Miss:
        params = op.params
        if params.zero_point is not None or params.spec.block != (None, None):
            return Miss(MissCode.ZERO_POINT, self.node, "zero is not stored as zero")
        cut = arguments(self.node)["diagonal"]
        return Crossing(
            (given(end, params),),
            lambda mover, values: [mover.call(aten.tril.default, values[0], cut)],
        )


class LiftMore(LiftQuantize):
    """The rule, with one op more."""

    families = (Triangle, *COMMUTING)


class SinkMore(SinkDequantize):
    """The rule, with one op more."""

    families = (Triangle, *COMMUTING)
    anchors = (*Triangle.ops, *SinkDequantize.anchors)


def parameters(g: Graph, zero: int | None) -> tuple[Any, Any]:
    """A scale of a power of two and a zero point, if there is one."""
    zero_point = None if zero is None else g.constant(torch.tensor([[zero]]), "zero")
    return g.constant(torch.tensor([[0.25]]), "scale"), zero_point


@pytest.mark.numeric
def test_golden_a_quantize_rises_above_an_op_that_was_added() -> None:
    g = Graph(4, 6)
    turned = g.call(aten.permute.default, g.call(aten.tril.default, g.x, 1), [1, 0])
    program = g.done(g.quantize(turned, spec_of(None, None), parameters(g, None)))

    assert applied(program, LiftMore).fired == {"lift-quantize": 2}
    assert steps(program)[:3] == ["quantize[4, 6]", "tril[4, 6]", "permute[6, 4]"]
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[4, 6]
const %scale1: float32[1, 1]
%0 = qfuse.quantize(%x, %scale1, None, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): int8[4, 6]
%1 = aten.tril(%0, 1): int8[4, 6]
%2 = aten.permute(%1, (1, 0)): int8[6, 4]
%3 = qfuse.dequantize(%2, %scale1, None, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): float32[6, 4]
%4 = aten.neg(%3): float32[6, 4]
return (%4)""",
    )


@pytest.mark.numeric
def test_golden_a_dequantize_sinks_below_an_op_that_was_added() -> None:
    g = Graph(1)
    x = g.dequantize(g.stored(4, 6), spec_of(None, None), parameters(g, None))
    program = g.done(g.call(aten.tril.default, x))

    assert applied(program, SinkMore).fired == {"sink-dequantize": 1}
    assert steps(program) == ["tril[4, 6]", "dequantize[4, 6]", "neg[4, 6]"]
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[1]
%q1: int8[4, 6]
const %scale2: float32[1, 1]
%0 = aten.tril(%q1, 0): int8[4, 6]
%1 = qfuse.dequantize(%0, %scale2, None, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): float32[4, 6]
%2 = aten.neg(%1): float32[4, 6]
return (%2)""",
    )


def test_refuses_what_the_op_refuses() -> None:
    g = Graph(1)
    x = g.dequantize(g.stored(4, 6), spec_of(None, None), parameters(g, 3))
    y = g.call(aten.tril.default, x)

    miss = only_miss(g.done(y), SinkMore)
    assert (miss.code, miss.at) == (MissCode.ZERO_POINT, y)


def test_the_rule_checks_users_and_strides_for_every_op() -> None:
    g = Graph(1)
    x = g.dequantize(g.stored(4, 6), spec_of(None, None), parameters(g, None))
    program = g.done(g.call(aten.tril.default, x), x)
    assert only_miss(program, SinkMore).code is MissCode.SHARED

    g = Graph(4, 6)
    y = g.call(aten.tril.default, g.x)
    program = g.b.done(g.quantize(y, spec_of(None, None), parameters(g, None)))
    assert only_miss(program, LiftMore).code is MissCode.SHARED


def test_no_op_is_of_two_families() -> None:
    counted = Counter(op for family in COMMUTING for op in family.ops)
    assert set(counted.values()) == {1}


def test_an_op_that_computes_is_of_no_family() -> None:
    g = Graph(4, 6)
    assert commuting(g.call(aten.neg.default, g.x), COMMUTING) is None
    assert commuting(g.x, COMMUTING) is None
