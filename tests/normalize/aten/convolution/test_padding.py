from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.convolution import Conv
from tests.support.cases.epilogue import calls
from tests.support.values import bits_same

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.normalize.aten.convolution.padding import SpellPadding
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import PassResult
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten
F32 = torch.float32


def spell(program: NormalGraph) -> PassResult:
    """Apply the rule; values and strides must stay the same."""
    source = clone(program)
    result = apply_rules(program, [SpellPadding()])
    inputs = random_inputs(program, m=3)
    got, want = run(program, inputs), run(source, inputs)
    assert bits_same(got, want)
    assert [y.stride() for y in got] == [y.stride() for y in want]
    return result


# Torch 2.15 says so of fake tensors too.
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_golden_a_kernel_that_is_even_along_one_axis() -> None:
    b = GraphBuilder()
    x = b.arg("x", F32, "m", 4, 6, 5)
    program = b.done(Conv(3, kernel=(4, 3), padding="same", bias=True).node(b, x, 4, "w"))

    assert spell(program).fired == {"spell-padding": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 4, 6, 5]
const %w_bias: float32[3]
const %w: float32[3, 4, 4, 3]
%0 = aten.constant_pad_nd(%x, (0, 0, 0, 1), 0.0): float32[s0, 4, 7, 5]
%1 = aten.conv2d(%0, %w, %w_bias, (1, 1), (1, 1), (1, 1), 1): float32[s0, 3, 6, 5]
return (%1)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("lead", [(), ("m",)], ids=str)
@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("kernel", [(3, 3, 5), (2, 3, 4), (1, 1, 1), (4, 2, 6)], ids=str)
@pytest.mark.parametrize("dilation", [1, 2, 3])
def test_every_padding(
    rank: int, lead: tuple[str, ...], padding: str, kernel: tuple[int, ...], dilation: int
) -> None:
    b = GraphBuilder()
    x = b.arg("x", F32, *lead, 4, *(16, 15, 17)[:rank])
    conv = Conv(3, kernel=kernel[:rank], padding=padding, settings=([dilation],))
    program = b.done(conv.node(b, x, 4, "w"))

    assert spell(program).fired == {"spell-padding": 1}
    uneven = padding == "same" and any(dilation * (k - 1) % 2 for k in kernel[:rank])
    pads = ["aten.constant_pad_nd"] * uneven
    assert calls(program) == [*pads, f"aten.conv{rank}d"]


@pytest.mark.numeric
def test_groups_stay_and_so_does_the_memory_order() -> None:
    b = GraphBuilder()
    x = b.arg("x", F32, 2, 4, 6, 5)
    last = b.call(aten.clone.default, x, memory_format=torch.channels_last)
    w = b.const("w", torch.randn(6, 2, 2, 3))
    y = b.call(aten.conv2d.padding, last, w, None, [1, 1], "same", [1, 1], 2)

    assert spell(b.done(y)).fired == {"spell-padding": 1}


def test_the_copy_of_an_input_of_dynamic_size_has_a_dynamic_size() -> None:
    b = GraphBuilder()
    x, w = b.arg("x", F32, "m", 4, 6), b.const("w", torch.randn(3, 4, 2))
    y = b.call(aten.conv1d.default, x, w, None, [1], [1])
    # Torch itself treats the size as a number when it infers this type.
    y.target, y.args = aten.conv1d.padding, (x, w, None, [1], "same")
    with y.meta["val"].fake_mode:
        y.meta["val"] = torch.empty((x.meta["val"].shape[0], 3, 6))
    program = b.done(y)

    assert apply_rules(program, [SpellPadding()]).fired == {"spell-padding": 1}
    assert "float32[s0, 4, 7]" in to_text(program.graph)
    assert "float32[s0, 3, 6]" in to_text(program.graph)


def test_refuses_an_input_without_a_batch_in_another_order() -> None:
    b = GraphBuilder()
    x, w = b.arg("x", F32, 6, 5, 4), b.const("w", torch.randn(3, 4, 2, 2))
    last = b.call(aten.permute.default, x, [2, 0, 1])
    program = b.done(b.call(aten.conv2d.padding, last, w, None, [1, 1], "same"))

    result = apply_rules(program, [SpellPadding()])
    assert not result.modified
    (miss,) = [m for _, m in result.misses]
    assert (miss.code, miss.at.name) == (MissCode.SHAPE, last.name)


@pytest.mark.numeric
def test_infinities_next_to_the_border() -> None:
    b = GraphBuilder()
    x = b.arg("x", F32, 1, 4, 3)
    big = b.call(aten.mul.Tensor, x, 1e39)
    program = b.done(Conv(2, kernel=(2,), padding="same").node(b, big, 4, "w"))
    source = clone(program)

    apply_rules(program, [SpellPadding()])
    inputs = random_inputs(program)
    (got,), (want,) = run(program, inputs), run(source, inputs)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


def test_refuses_settings_of_run_time() -> None:
    b = GraphBuilder()
    x, w = b.arg("x", F32, 1, 4, 6), b.const("w", torch.randn(3, 4, 2))
    y = b.call(aten.conv1d.padding, x, w, None, [1], "same", [1])
    step = b.graph.call_function(aten.sym_size.int, (x, 0))
    step.meta["val"] = 1
    y.prepend(step)
    y.args = (*y.args[:5], [step])
    program = b.done(y)
    before = to_text(program.graph)

    result = apply_rules(program, [SpellPadding()])
    assert not result.modified
    assert to_text(program.graph) == before
    (miss,) = [m for _, m in result.misses]
    assert (miss.code, miss.at.name) == (MissCode.ARGUMENT, y.name)


def test_refuses_a_kernel_of_unknown_size() -> None:
    b = GraphBuilder()
    x, w = b.arg("x", F32, 1, 4, 6), b.arg("w", F32, 3, 4, "k")
    y = b.call(aten.conv1d.padding, x, w, None, [1], "same", [1])
    program = b.done(y)

    result = apply_rules(program, [SpellPadding()])
    assert not result.modified
    (miss,) = [m for _, m in result.misses]
    assert (miss.code, miss.at.name) == (MissCode.SHAPE, w.name)
