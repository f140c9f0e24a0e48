"""Activations of 8 bits that are held in wider integers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    calls,
    finish,
    golden,
    refusal,
    scales,
)
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.normalize.aten.operands.narrow_activation import NarrowActivation
from qfuse.rewrite.rule import Miss
from qfuse.testing.build import GraphBuilder

F32 = torch.float32
RULE = NarrowActivation()
Build = Callable[["Wide"], Node]


class Wide:
    """Values that are rounded and kept in a wide integer dtype.

    Args:
        kept: That dtype.
    """

    def __init__(self, kept: torch.dtype = torch.int32) -> None:
        self.b = GraphBuilder()
        self.x = self.b.arg("x", F32, 3, 8)
        self.inputs = [torch.randn(3, 8) * 9]
        self.kept = kept

    def clamped(self, low: float, high: float) -> Node:
        """Round, clamp and cast."""
        rounded = self.b.call(aten.round.default, self.b.call(aten.div.Tensor, self.x, 0.05))
        return self.cast(self.b.call(aten.clamp.default, rounded, low, high), self.kept)

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        """Cast."""
        return self.b.call(aten._to_copy.default, x, dtype=dtype)

    def linear(self, x: Node) -> CapturedGraph:
        """Finish with a scale and a linear."""
        scaled = self.b.call(aten.mul.Tensor, x, 0.05)
        weight = self.b.const("w", scales(5, 8))
        return finish(self.b, self.b.call(aten.linear.default, scaled, weight))


def test_golden_an_activation_in_int32() -> None:
    a = Wide()
    assert_expected_inline(
        golden(a.linear(a.cast(a.clamped(-128, 127), F32)), RULE),
        """\
%x: float32[3, 8]
%0 = aten.div.Tensor(%x, 0.05): float32[3, 8]
%1 = aten.round(%0): float32[3, 8]
%2 = aten.clamp(%1, -128, 127): float32[3, 8]
%3 = aten._to_copy(%2, dtype=int8): int8[3, 8]
%4 = aten._to_copy(%3, dtype=int32): int32[3, 8]
%5 = aten._to_copy(%4, dtype=float32): float32[3, 8]
%6 = aten.mul.Tensor(%5, 0.05): float32[3, 8]
const %w: float32[5, 8]
%7 = aten.linear(%6, %w): float32[3, 5]
return (%7)
fired: narrow-activation 1""",
    )


def _given(a: Wide) -> Node:
    k = a.b.arg("k", a.kept, 3, 8)
    a.inputs = [torch.randint(-300, 300, (3, 8)).to(a.kept)]
    a.b.graph.erase_node(a.x)
    return a.cast(a.b.call(aten.clamp.default, k, 0, 255), F32)


SPELLINGS: dict[str, Build] = {
    "cast": lambda a: a.cast(a.clamped(-127, 127), F32),
    "uint8": lambda a: a.cast(a.clamped(0, 255), F32),
    "in a product": lambda a: a.b.call(aten.mul.Tensor, a.clamped(-128, 127), 1.5),
    "in a quotient": lambda a: a.b.call(aten.div.Tensor, a.clamped(-128, 127), 127.0),
    "shifted": lambda a: a.cast(a.b.call(aten.sub.Tensor, a.clamped(0, 255), 12), F32),
    "clamped as integers": _given,
}


@pytest.mark.numeric
@pytest.mark.parametrize("kept", [torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name: str, kept: torch.dtype) -> None:
    a = Wide(kept)
    program = a.linear(SPELLINGS[name](a))

    fired = assert_same_values(program, a.inputs, RULE, exact=True).fired
    assert fired == {RULE.name: 1}
    dtypes = {n.meta["val"].dtype for n in program.graph.nodes if n.op == "call_function"}
    assert dtypes & {torch.int8, torch.uint8}
    assert "aten.linear" in calls(program)


REFUSALS: dict[str, tuple[MissCode, Build]] = {
    "more than 8 bits": (MissCode.RANGE, lambda a: a.cast(a.clamped(-129, 127), F32)),
    "fractions": (MissCode.RANGE, lambda a: a.cast(a.clamped(-128.5, 127.5), F32)),
    "8 bits already": (
        MissCode.PATTERN,
        lambda a: a.cast(a.cast(a.cast(a.clamped(0, 9), torch.int8), torch.int32), F32),
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(name: str) -> None:
    code, build = REFUSALS[name]
    a = Wide()
    program = a.linear(build(a))
    before = calls(program)

    assert code in {
        miss.code
        for n in program.graph.nodes
        if n.target in RULE.anchors and isinstance(miss := RULE.match(n), Miss)
    }
    assert refusal(program, RULE)
    assert calls(program) == before


def test_refuses_what_no_product_reads() -> None:
    a = Wide()
    program = finish(a.b, a.cast(a.clamped(0, 9), F32))
    assert refusal(program, RULE)[0] is MissCode.PATTERN
