from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.epilogue import calls
from tests.support.cases.propagate import priced
from torch.fx import Node

from qfuse.ir.events import MissCode, Missed
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.optimize.layout.row_major import MakeRowMajor
from qfuse.rewrite.budget import RewriteBudget
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import PassResult, RewriteContext
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten
WIDTH = 8


class Layers(GraphBuilder):
    """Layers on a residual sum that begins with a permuted value."""

    def begin(self, *sizes: int | str) -> Node:
        """Add channels in front of positions, and the sum of positions in front of channels."""
        batch, positions = sizes or ("n", "l")
        x = self.arg("x", torch.float32, batch, WIDTH, positions)
        turned = self.call(aten.permute.default, x, [0, 2, 1])
        return self.call(aten.add.Tensor, turned, self.const("place", torch.randn(WIDTH)))

    def norm(self, x: Node, name: str) -> Node:
        """Add a norm over channels."""
        weight = self.const(f"{name}_weight", torch.rand(WIDTH) + 0.5)
        return self.call(aten.layer_norm.default, x, [WIDTH], weight)

    def linear(self, x: Node, name: str) -> Node:
        """Add a linear of channels."""
        return self.call(aten.linear.default, x, self.const(name, torch.randn(WIDTH, WIDTH)))

    def layer(self, x: Node, name: str) -> Node:
        """Add a norm, a linear and a residual sum."""
        y = self.linear(self.norm(x, f"{name}_norm"), name)
        return self.call(aten.add.Tensor, x, y)


def arranged(program: NormalGraph, context: RewriteContext | None = None) -> PassResult:
    """Run the pass; values and the strides of results must stay."""
    source = clone(program)
    result = MakeRowMajor().run(program, context or priced())
    inputs = random_inputs(source, **{str(s): 5 for s in source.signature.symbols})
    for old, new in zip(run(source, inputs), run(program, inputs), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-5)
        assert new.stride() == old.stride()
    return result


@pytest.mark.numeric
def test_golden_a_residual_sum_becomes_row_major_once() -> None:
    b = Layers()
    program = b.done(b.norm(b.layer(b.begin(), "a"), "last"))
    assert arranged(program).fired == {"make-row-major": 1}

    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 8, s1]
%0 = aten.permute(%x, (0, 2, 1)): float32[s0, s1, 8]
const %place: float32[8]
%1 = aten.clone(%0, memory_format=torch.contiguous_format): float32[s0, s1, 8]
%2 = aten.add.Tensor(%1, %place): float32[s0, s1, 8]
const %a_norm_weight: float32[8]
%3 = aten.layer_norm(%2, (8), %a_norm_weight): float32[s0, s1, 8]
const %a: float32[8, 8]
%4 = aten.linear(%3, %a): float32[s0, s1, 8]
%5 = aten.add.Tensor(%2, %4): float32[s0, s1, 8]
const %last_weight: float32[8]
%6 = aten.layer_norm(%5, (8), %last_weight): float32[s0, s1, 8]
return (%6)""",
    )


def test_every_sum_is_row_major() -> None:
    b = Layers()
    program = b.done(b.norm(b.layer(b.layer(b.begin(2, 5), "a"), "b"), "last"))
    arranged(program)

    sums = program.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    assert [node.meta["val"].is_contiguous() for node in sums] == [True] * 3
    assert calls(program).count("aten.clone") == 1


def test_a_sum_that_leaves_the_graph_keeps_its_strides() -> None:
    b = Layers()
    y = b.layer(b.layer(b.begin(2, 5), "a"), "b")
    program = b.done(b.norm(y, "last"), y)

    assert arranged(program).fired == {"make-row-major": 1}
    assert calls(program).count("aten.clone") == 2


def test_a_stride_that_is_asked_for_is_that_of_before() -> None:
    b = Layers()
    y = b.layer(b.layer(b.begin(2, 5), "a"), "b")
    step = b.call(aten.sym_stride.int, y, 1)
    program = b.done(
        b.norm(y, "last"), b.call(aten.neg.default, b.call(aten.as_strided.default, y, [2], [step]))
    )

    assert arranged(program).fired == {"make-row-major": 1}
    (asked,) = program.graph.find_nodes(op="call_function", target=aten.sym_stride.int)
    assert asked.all_input_nodes[0].meta["val"].stride() == y.meta["val"].stride()


@pytest.mark.parametrize("rows", [(2, 5), (1, 1), (2, 0), (2, 1), ("n", 5), (1, "l")])
def test_any_number_of_rows(rows: tuple[int | str, ...]) -> None:
    b = Layers()
    program = b.done(b.norm(b.layer(b.begin(*rows), "a"), "last"))

    # Rows of one position, or of none, are in row-major order as they are.
    permuted = rows not in {(1, 1), (2, 0), (2, 1)}
    assert arranged(program).fired == ({"make-row-major": 1} if permuted else {})


def test_an_op_that_would_get_other_strides_reads_a_copy_of_before() -> None:
    """A view of positions and channels as one axis is not possible in row-major order."""
    b = Layers()
    y = b.layer(b.layer(b.layer(b.begin(2, 5), "a"), "b"), "c")
    turned = b.call(aten.permute.default, y, [0, 2, 1])
    program = b.done(b.norm(y, "last"), b.call(aten.view.default, turned, [2, WIDTH * 5]))

    assert arranged(program).fired == {"make-row-major": 1}
    assert calls(program).count("aten.clone") == 2


def test_images_stay_channels_last() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, 6, 5, 4)
    image = b.call(aten.permute.default, x, [0, 3, 1, 2])
    y = b.call(aten.relu.default, b.call(aten.neg.default, image))
    program = b.done(y, *(b.call(aten.mean.dim, y, [-1]) for _ in range(3)))

    assert arranged(program).fired == {}


def test_pixels_in_front_of_channels_become_row_major() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, WIDTH, 5, 4)
    pixels = b.call(aten.permute.default, x, [0, 2, 3, 1])
    y = b.call(aten.relu.default, pixels)
    weight = b.const("w", torch.rand(WIDTH))
    norms = [b.call(aten.layer_norm.default, y, [WIDTH], weight) for _ in range(2)]
    program = b.done(*norms)

    assert arranged(program).fired == {"make-row-major": 1}


@pytest.mark.parametrize("reader", ["one norm", "columns", "none"])
def test_does_not_pay_for_one_op_that_reads_rows(reader: str) -> None:
    b = Layers()
    x = b.begin(2, 5)
    y = {
        "one norm": lambda: b.norm(x, "a"),
        "columns": lambda: b.call(aten.sum.dim_IntList, x, [1]),
        "none": lambda: b.call(aten.view.default, b.call(aten.permute.default, x, [0, 2, 1]), [-1]),
    }[reader]()
    program = b.done(y)

    assert arranged(program).fired == {}
    missed = [e for e in program.log.of(Missed) if e.rule == "make-row-major"]
    assert [e.code for e in missed] == [MissCode.PROFIT] * (reader == "one norm")


def test_a_sum_of_unknown_size_that_leaves_the_graph_keeps_its_strides() -> None:
    b = Layers()
    y = b.layer(b.layer(b.begin("n", "l"), "a"), "b")
    program = b.done(b.norm(y, "last"), y)

    assert arranged(program).fired == {"make-row-major": 1}
    assert calls(program).count("aten.clone") == 2


def test_an_op_outside_reads_a_value_that_enters_as_it_was() -> None:
    b = Layers()
    x = b.begin(2, 5)
    turned = x.all_input_nodes[0]
    program = b.done(b.norm(b.layer(x, "a"), "last"), b.call(aten.mean.dim, turned, [-1]))

    assert arranged(program).fired == {"make-row-major": 1}
    (mean,) = program.graph.find_nodes(op="call_function", target=aten.mean.dim)
    assert mean.all_input_nodes == [turned]


def test_a_norm_written_out_reads_what_would_enter() -> None:
    """Only the product of differences would be in row-major order."""
    b = Layers()
    x = b.begin(2, 5).all_input_nodes[0]
    mean = b.call(aten.mean.dim, x, [-1], True)
    deviation = b.call(aten.rsqrt.default, b.call(aten.var.correction, x, [-1], keepdim=True))
    centered = b.call(aten.sub.Tensor, x, mean)
    program = b.done(b.linear(b.call(aten.mul.Tensor, centered, deviation), "a"))

    assert arranged(program).fired == {}


def test_products_of_one_value_read_it_once() -> None:
    b = Layers()
    x = b.begin(2, 5)
    program = b.done(*(b.linear(x, name) for name in "qkv"))

    assert arranged(program).fired == {}


def test_heads_in_front_of_positions_are_rows() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, 5, 3, WIDTH)
    heads = b.call(aten.mul.Tensor, b.call(aten.transpose.int, x, 1, 2), 0.3)
    norms = (b.call(aten.layer_norm.default, heads, [WIDTH]) for _ in range(3))
    program = b.done(*norms)

    assert arranged(program).fired == {}


def test_an_expanded_operand_is_not_copied() -> None:
    b = Layers()
    gate = b.call(aten.expand.default, b.arg("gate", torch.float32, 2, 1, WIDTH), [2, 5, WIDTH])
    y = b.call(aten.mul.Tensor, b.layer(b.begin(2, 5), "a"), gate)
    program = b.done(b.norm(y, "last"))

    assert arranged(program).fired == {"make-row-major": 1}
    assert calls(program).count("aten.clone") == 1


def test_a_part_of_a_row_is_not_copied() -> None:
    b = Layers()
    gates = b.call(aten.split.Tensor, b.arg("gates", torch.float32, 2, 1, 2 * WIDTH), WIDTH, 2)
    y = b.call(aten.mul.Tensor, b.layer(b.begin(2, 5), "a"), b.item(gates, 1))
    program = b.done(b.norm(y, "last"))

    assert arranged(program).fired == {"make-row-major": 1}
    assert calls(program).count("aten.clone") == 1


def test_an_image_of_the_sum_stays_channels_last() -> None:
    """Otherwise the convolutions behind it would become row-major."""
    b = Layers()
    y = b.layer(b.layer(b.layer(b.begin(2, 20), "a"), "b"), "c")
    turned = b.call(aten.permute.default, y, [0, 2, 1])
    image = b.call(aten.view.default, turned, [2, WIDTH, 5, 4])
    program = b.done(b.norm(y, "last"), b.call(aten.relu.default, image))

    assert arranged(program).fired == {"make-row-major": 1}
    (relu,) = program.graph.find_nodes(op="call_function", target=aten.relu.default)
    assert relu.meta["val"].stride() == image.meta["val"].stride()


def test_results_that_were_copies_do_not_share_memory() -> None:
    b = Layers()
    y = b.layer(b.layer(b.layer(b.begin(2, 5), "a"), "b"), "c")
    flat = [b.call(aten.reshape.default, y, [-1]) for _ in range(2)]
    program = b.done(b.norm(y, "last"), *flat)

    assert arranged(program).fired == {"make-row-major": 1}
    _, one, two = run(program, random_inputs(program))
    assert one.data_ptr() != two.data_ptr()


def test_a_part_of_a_model_stays_out_of_the_scope() -> None:
    b = Layers()
    program = b.done(b.norm(b.layer(b.begin(2, 5), "a"), "last"))
    first = next(iter(program.graph.find_nodes(op="call_function", target=aten.add.Tensor)))
    context = RewriteContext("optimize", scope=frozenset({first.name}))

    assert arranged(program, context).fired == {}


def test_random_numbers_are_drawn_in_the_order_of_before() -> None:
    b = Layers()
    y = b.layer(b.layer(b.layer(b.begin(2, 5), "a"), "b"), "c")
    noise = b.call(aten.rand_like.default, y)
    program = b.done(b.norm(y, "last"), b.call(aten.add.Tensor, noise, 1))

    assert MakeRowMajor().run(program, priced()).fired == {"make-row-major": 1}
    (drawn,) = program.graph.find_nodes(op="call_function", target=aten.rand_like.default)
    assert not drawn.meta["val"].is_contiguous()


def test_a_budget_bans_it() -> None:
    b = Layers()
    program = b.done(b.norm(b.layer(b.begin(2, 5), "a"), "last"))
    banned = RewriteBudget(banned=frozenset({"optimize/make-row-major"}))

    assert arranged(program, RewriteContext("optimize", budget=banned)).fired == {}
