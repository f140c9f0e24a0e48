"""The text of a graph: stable names, every type, and nothing that depends on what ran before."""

from __future__ import annotations

import operator

import pytest
import torch
from expecttest import assert_expected_inline

from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.graph.text import op_text, to_text, type_text
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.spec import QuantSpec
from qfuse.testing.build import GraphBuilder

aten = torch.ops.aten


def program(*, unrelated: int = 0) -> NormalGraph:
    """A graph with every kind of node; other graphs may have been made in its fake mode before."""
    b = GraphBuilder()
    for index in range(unrelated):
        # Takes symbols of the mode, which the text must not show.
        b.graph.erase_node(b.arg(f"unrelated{index}", torch.float32, f"u{index}"))
    x = b.arg("x", torch.float32, "m", 6)
    scale = b.const("scale", torch.tensor([[0.1]]))
    q = b.call(ops.quantize, x, scale, None, str(QuantSpec(torch.int8, -128, 127, (None, None))))
    cast = b.call(aten._to_copy.default, q, dtype=torch.bfloat16)
    parts = b.call(aten.split_with_sizes.default, cast, [2, 4], -1)
    return b.done(b.item(parts, 1), b.call(aten.cat.default, [x, x], -1))


def test_a_graph_is_one_node_per_line() -> None:
    assert_expected_inline(
        to_text(program().graph),
        """\
%x: float32[s0, 6]
const %scale: float32[1, 1]
%0 = qfuse.quantize(%x, %scale, None, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): int8[s0, 6]
%1 = aten._to_copy(%0, dtype=bfloat16): bfloat16[s0, 6]
%2 = aten.split_with_sizes(%1, (2, 4), -1): (bfloat16[s0, 2], bfloat16[s0, 4])
%3 = getitem(%2, 1): bfloat16[s0, 4]
%4 = aten.cat((%x, %x), -1): float32[s0, 12]
return (%3, %4)""",
    )


@pytest.mark.parametrize("unrelated", [1, 3])
def test_symbols_are_numbered_by_their_first_appearance(unrelated: int) -> None:
    assert to_text(program(unrelated=unrelated).graph) == to_text(program().graph)


def test_names_that_look_like_symbols_are_kept() -> None:
    b = GraphBuilder()
    rows = b.arg("u3", torch.float32, "m", 4)
    one, other = b.const("s1", torch.ones(4)), b.const("s2", torch.zeros(4))
    b.graph.erase_node(b.arg("unrelated", torch.float32, "n"))
    columns = b.arg("t", torch.float32, "k", 4)
    y = b.call(aten.add.Tensor, b.call(aten.mul.Tensor, rows, one), other)

    assert_expected_inline(
        to_text(b.done(y, columns).graph),
        """\
%u3: float32[s0, 4]
const %s1: float32[4]
const %s2: float32[4]
%t: float32[s1, 4]
%0 = aten.mul.Tensor(%u3, %s1): float32[s0, 4]
%1 = aten.add.Tensor(%0, %s2): float32[s0, 4]
return (%1, %t)""",
    )


def test_names_are_positions() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2)
    y = b.call(aten.neg.default, x)
    before = to_text(b.done(y).graph)
    y.name = "another"

    assert to_text(b.graph) == before


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(2, 3, dtype=torch.bfloat16), "bfloat16[2, 3]"),
        (torch.tensor(1), "int64[]"),
        ((torch.zeros(2), torch.zeros(1, dtype=torch.int8)), "(float32[2], int8[1])"),
        ([torch.zeros(2)], "(float32[2])"),
        (None, "?"),
        (3, "int"),
    ],
    ids=str,
)
def test_types(value: object, text: str) -> None:
    assert type_text(value) == text


def test_calls_have_short_names() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2)
    item = b.item(b.call(aten.split.Tensor, x, 1), 0)

    assert [op_text(n) for n in b.graph.nodes] == ["placeholder", "aten.split.Tensor", "getitem"]
    assert item.target is operator.getitem


def test_a_value_that_is_not_known_is_a_question_mark() -> None:
    b = GraphBuilder()
    y = b.call(aten.neg.default, b.arg("x", torch.float32, 2))
    del y.meta["val"]

    assert to_text(b.done(y).graph).splitlines()[1] == "%0 = aten.neg(%x): ?"
