"""The rewriter keeps meta and provenance, and puts a graph back exactly as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from qfuse.ir.errors import RewriteError
from qfuse.ir.graph.stage_graph import MODULE_META, RULE_META, SOURCE_META, NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.stages.verify import verify
from qfuse.rewrite.rewriter import ORIGIN_META, GraphEditor, Rewriter, origins
from qfuse.testing.build import GraphBuilder

aten = torch.ops.aten


class Case:
    """``neg(relu(x) * w)``; the product is the anchor."""

    def __init__(self, *, shared: bool = False) -> None:
        b = GraphBuilder()
        self.x = b.arg("x", torch.float32, "m", 6)
        self.w = b.const("w", torch.randn(6))
        self.relu = b.call(aten.relu.default, self.x)
        self.anchor = b.call(aten.mul.Tensor, self.relu, self.w)
        self.anchor.meta |= {SOURCE_META: "model.py:3", MODULE_META: "mlp"}
        self.neg = b.call(aten.neg.default, self.anchor)
        outs = (self.neg, self.relu) if shared else (self.neg,)
        self.program: NormalGraph = b.done(*outs)
        self.editor = GraphEditor(self.program.module)
        self.rw: Rewriter = self.editor.rewriter("toy", self.anchor)

    @property
    def text(self) -> str:
        """The graph as it stands."""
        return to_text(self.program.graph)


def state(program: NormalGraph) -> list[Any]:
    """All that undoing has to bring back."""
    return [
        (n, n.op, n.target, n.args, dict(n.kwargs), dict(n.meta), set(n.users))
        for n in program.graph.nodes
    ]


def test_a_call_that_would_fix_a_size_is_refused() -> None:
    case = Case()

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(int(x.shape[0]))

    with pytest.raises(RuntimeError, match=r"it would fix a size that may vary \(s\w+\)"):
        case.editor.infer(rows, (case.x,), {})

    assert not is_concrete_int(case.x.meta["val"].shape[0])
    twice = case.rw.call(aten.cat.default, [case.x, case.x])
    assert not is_concrete_int(twice.meta["val"].shape[0])


def test_a_composite_in_cpp_keeps_a_size_that_may_vary() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "n", 2, 5, 7)
    anchor = b.call(aten.relu.default, x)
    program = b.done(anchor)

    rw = GraphEditor(program.module).rewriter("toy", anchor)
    larger = rw.call(aten.upsample_nearest2d.vec, x, None, [2.0, 2.0])

    rows, *others = larger.meta["val"].shape
    assert not is_concrete_int(rows)
    assert others == [2, 10, 14]


def test_a_call_stands_before_the_anchor_and_has_a_value() -> None:
    case = Case()
    first = case.rw.call(aten.abs.default, case.relu)
    second = case.rw.call(aten.sum.dim_IntList, first, [-1])

    names = [n.name for n in case.program.graph.nodes]
    assert names.index(first.name) + 1 == names.index(second.name)
    assert names.index(second.name) + 1 == names.index(case.anchor.name)
    assert (second.meta["val"].dtype, second.meta["val"].dim()) == (torch.float32, 1)
    assert second.meta["val"].shape[0] == case.x.meta["val"].shape[0]


def test_before_moves_the_place_for_a_while() -> None:
    case = Case()
    with case.rw.before(case.neg):
        late = case.rw.call(aten.abs.default, case.anchor)
    early = case.rw.call(aten.abs.default, case.relu)

    names = [n.name for n in case.program.graph.nodes]
    assert names.index(early.name) < names.index(case.anchor.name) < names.index(late.name)
    verify(case.program)


def test_new_nodes_have_the_source_of_the_anchor_and_the_name_of_the_rule() -> None:
    case = Case()
    constant = torch.ones(6)
    made = [
        case.rw.call(aten.abs.default, case.relu),
        case.rw.constant(constant, "ones"),
        case.rw.replay(aten.neg.default, (case.relu,), {}, case.relu.meta["val"]),
    ]

    for node in made:
        assert (node.meta[SOURCE_META], node.meta[MODULE_META]) == ("model.py:3", "mlp")
        assert node.meta[RULE_META] == "toy"
    assert case.rw.journal.made == made
    assert SOURCE_META not in case.neg.meta


def test_a_commit_passes_on_whom_a_node_stands_for() -> None:
    case = Case()
    new = case.rw.call(aten.mul.Tensor, case.x, case.w)
    relu, anchor = case.relu.name, case.anchor.name
    case.rw.replace(case.anchor, new)
    erased, around = case.rw.commit()

    assert [n.name for n in erased] == [anchor, relu]
    assert set(new.meta[ORIGIN_META]) == {anchor, relu}
    assert set(origins(new)) == {anchor, relu}
    assert origins(case.neg) == (case.neg.name,)
    assert {case.neg, new, case.x, case.w} <= set(around)
    assert set(around).isdisjoint(erased)
    verify(case.program)

    again = case.editor.rewriter("second", new)
    last = again.call(aten.mul.Tensor, case.w, case.x)
    again.replace(new, last)
    again.commit()
    assert set(origins(last)) == {anchor, relu}


def test_what_others_read_is_not_erased() -> None:
    case = Case(shared=True)
    new = case.rw.call(aten.mul.Tensor, case.x, case.w)
    case.rw.replace(case.anchor, new)
    erased, around = case.rw.commit()

    assert [n.op for n in erased] == ["call_function"]
    assert case.relu in case.program.graph.nodes
    assert case.relu in around
    assert case.relu.name not in origins(new)
    verify(case.program)


def test_inputs_stay_although_nothing_reads_them() -> None:
    case = Case()
    zero = case.rw.constant(torch.zeros(6), "zero")
    new = case.rw.call(aten.expand.default, zero, [*case.rw.sizes(case.x, 1), 6])
    case.rw.replace(case.anchor, new)
    erased, _ = case.rw.commit()

    assert case.w in erased
    assert case.x in case.program.graph.nodes
    verify(case.program)


def test_what_was_made_in_vain_dies_with_the_commit() -> None:
    case = Case()
    before = case.text
    sin = case.rw.call(aten.sin.default, case.relu)
    made = {sin, case.rw.call(aten.abs.default, sin)}
    erased, _ = case.rw.commit()

    assert set(erased) == made
    assert case.text == before


def test_undo_puts_everything_back() -> None:
    case = Case(shared=True)
    before, text = state(case.program), case.text
    first = case.rw.call(aten.mul.Tensor, case.x, case.w)
    case.rw.replace(case.anchor, first)
    second = case.rw.call(aten.relu.default, case.x)
    case.rw.replace(case.relu, second, but=(case.neg,))
    assert case.text != text

    case.rw.undo()

    assert case.text == text
    assert state(case.program) == before
    assert case.rw.journal.made == []
    verify(case.program)


def test_a_user_that_reads_twice_reads_the_new_value_twice() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 3)
    relu = b.call(aten.relu.default, x)
    both = b.call(aten.cat.default, [relu, relu])
    program = b.done(both)
    rw = GraphEditor(program.module).rewriter("toy", relu)
    before = state(program)

    new = rw.call(aten.abs.default, x)
    rw.replace(relu, new)
    assert both.args == ([new, new],)
    rw.undo()

    assert state(program) == before


def test_the_new_node_may_read_the_old_one() -> None:
    case = Case()
    with case.rw.before(case.neg):
        new = case.rw.call(aten.abs.default, case.anchor)
    case.rw.replace(case.anchor, new)
    erased, _ = case.rw.commit()

    assert erased == []
    assert new.args == (case.anchor,)
    assert case.neg.args == (new,)
    verify(case.program)


def test_some_users_may_go_on_reading_the_old_one() -> None:
    case = Case(shared=True)
    new = case.rw.call(aten.abs.default, case.x)
    case.rw.replace(case.relu, new, but=(case.anchor,))

    assert case.anchor.args[0] is case.relu
    assert new in case.program.graph.output_node().all_input_nodes


def test_a_value_keeps_its_type() -> None:
    case = Case()
    before = case.text
    new = case.rw.call(aten._to_copy.default, case.relu, dtype=torch.bfloat16)

    with pytest.raises(RewriteError, match=r"from float32\[s\d+, 6\] to bfloat16") as error:
        case.rw.replace(case.anchor, new)
    assert "rule toy" in error.value.what
    assert "(mlp)" in str(error.value.where)
    assert case.text == before


def test_a_call_that_its_op_rejects_is_an_error_and_changes_nothing() -> None:
    case = Case()
    before = case.text
    case.rw.call(aten.abs.default, case.relu)

    with pytest.raises(RewriteError, match="a call that its op rejects: ") as error:
        case.rw.call(aten.permute.default, case.relu, [0, 1, 2])
    assert "aten.permute" in error.value.what
    assert "(mlp)" in str(error.value.where)
    assert case.text == before


def test_a_tensor_is_stored_once() -> None:
    case = Case()
    tensor = torch.ones(6)
    first, second = (case.rw.constant(tensor, "one.s") for _ in range(2))
    other = case.rw.constant(torch.ones(6), "one.s")
    known = case.rw.constant(case.program.module.get_buffer("w"), "again")

    assert first.target == second.target == "one_s"
    assert (other.target, known.target) == ("one_s_1", "w")
    assert first.meta["val"].shape == (6,)
    assert len(dict(case.program.module.named_buffers())) == 3


def test_sizes_are_numbers_or_nodes() -> None:
    case = Case()
    first, second = case.rw.sizes(case.relu, 2)

    assert isinstance(first, torch.fx.Node)
    assert first.target is aten.sym_size.int
    assert second == 6


def test_one_of_several_results() -> None:
    case = Case()
    parts = case.rw.call(aten.split_with_sizes.default, case.relu, [2, 4], -1)
    item = case.rw.item(parts, 1)

    assert item.meta["val"] is parts.meta["val"][1]
    assert item.args == (parts, 1)


def test_a_sweep_erases_chains_that_nothing_reads() -> None:
    case = Case()
    before = case.text
    case.rw.call(aten.sin.default, case.rw.call(aten.abs.default, case.relu))
    case.editor.sweep()

    assert case.text == before
