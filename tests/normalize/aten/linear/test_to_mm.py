from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import aten, finish
from tests.support.values import bits_same

from qfuse.ir.events import Exactness, MissCode
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops.linear import as_linear
from qfuse.normalize.aten.linear.to_mm import SpellMm
from qfuse.normalize.builtin import ATEN
from qfuse.normalize.importers.dialect import rules_of
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Miss
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import run


def there_and_back(b: GraphBuilder, *outs: torch.fx.Node) -> tuple[str, int]:
    """Spell a graph canonically and back; return its text, and how often the rule fired."""
    program = finish(b, *outs)
    source = {n.name: op for n in program.graph.nodes if (op := overload_of(n)) is not None}
    before = clone(program)
    apply_rules(program, rules_of([ATEN]), RewriteContext("normalize"))
    fired = apply_rules(program, [SpellMm(source)]).fired["spell-mm"]
    inputs = [
        torch.randn([5 if not isinstance(s, int) else s for s in n.meta["val"].shape])
        for n in program.graph.find_nodes(op="placeholder")
    ]
    assert bits_same(run(before, inputs), run(program, inputs))
    return to_text(program.graph), fired


@pytest.mark.numeric
def test_golden_products_of_matrices_with_and_without_a_bias() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "m", 8)
    w = b.const("w", torch.randn(8, 4))
    bias = b.const("bias", torch.randn(4))
    y = b.call(aten.addmm.default, bias, x, w)
    u = b.call(aten.permute.default, b.const("u", torch.randn(3, 8)), [1, 0])
    text, fired = there_and_back(b, y, b.call(aten.mm.default, x, u))

    assert fired == 2
    assert_expected_inline(
        text,
        """\
%x: float32[s0, 8]
const %bias: float32[4]
const %w_t_1: float32[8, 4]
%0 = aten.addmm(%bias, %x, %w_t_1): float32[s0, 4]
const %u: float32[3, 8]
%1 = aten.permute(%u, (1, 0)): float32[8, 3]
%2 = aten.mm(%x, %1): float32[s0, 3]
return (%0, %2)""",
    )


@pytest.mark.numeric
def test_golden_views_around_it_are_made_again() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "m", 3, 8)
    flat = b.call(aten.reshape.default, x, [-1, 8])
    y = b.call(aten.mm.default, flat, b.const("w", torch.randn(8, 4)))
    size = b.call(aten.sym_size.int, x, 0)
    text, fired = there_and_back(b, b.call(aten.view.default, y, [size, 3, 4]))

    assert fired == 1
    assert_expected_inline(
        text,
        """\
%x: float32[s0, 3, 8]
const %w_t_1: float32[8, 4]
%0 = aten.reshape(%x, (-1, 8)): float32[3*s0, 8]
%1 = aten.mm(%0, %w_t_1): float32[3*s0, 4]
%2 = aten.sym_size.int(%x, 0): SymInt
%3 = aten.view(%1, (%2, 3, 4)): float32[s0, 3, 4]
return (%3)""",
    )


@pytest.mark.numeric
def test_refuses_what_the_source_wrote_as_a_linear() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "m", 8)
    y = b.call(aten.linear.default, x, b.const("w", torch.randn(4, 8)))

    assert there_and_back(b, y)[1] == 0


def test_refuses_a_vector() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 8)
    y = b.call(aten.linear.default, x, b.const("w", torch.randn(4, 8)))
    y.meta |= {"qfuse_rule": "a-rule", "qfuse_origin": ("mm",)}
    b.done(y)
    assert as_linear(y) is not None
    found = SpellMm({"mm": aten.mm.default}).match(y)

    assert isinstance(found, Miss)
    assert (found.code, found.at) == (MissCode.SHAPE, x)
    assert SpellMm.exactness is Exactness.EXACT
