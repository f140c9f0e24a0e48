"""Graphs built by hand are as they would be captured."""

from __future__ import annotations

import pytest
import torch

from qfuse.ir.ops.views import shape_of
from qfuse.ir.signature.caller import Caller
from qfuse.testing.build import GraphBuilder

aten = torch.ops.aten


def test_an_input_has_the_layout_that_was_asked_for() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, 3, "h", 5, order=(0, 2, 3, 1))
    y = b.arg("y", torch.float32, 2, 3)
    program = b.done(b.call(aten.relu.default, x), b.call(aten.relu.default, y))

    assert [spec.order for spec in program.signature.inputs] == [(0, 2, 3, 1), None]
    assert [int(s) for s in x.meta["val"].stride()[1:]] == [1, 15, 3]
    given = [torch.randn(2, 3, 7, 5), torch.randn(2, 3)]
    read, other = Caller(program.signature).check(given)
    assert read.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(read, given[0])
    assert other is given[1]


def test_a_symbolic_size_stays_symbolic_where_a_capture_keeps_it() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 1, 2, "h", "w")
    y = b.call(aten.upsample_nearest2d.vec, x, None, [2.0, 2.0])

    assert not any(isinstance(size, int) for size in (*shape_of(x)[2:], *shape_of(y)[2:]))
    assert str(shape_of(y)[2]) == f"2*{shape_of(x)[2]}"


def test_a_derived_size_that_a_call_fixes_is_an_error() -> None:
    """The symbol is one still: a length of 5 and one of 6 give a single window."""
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 1, 4, "n")
    w = b.const("w", torch.ones(4, 4, 5))
    y = b.call(torch.ops.aten.conv1d.default, x, w, None, [2])
    sum_ = b.call(torch.ops.aten.add.Tensor, y, b.const("c", torch.ones(4, 2)))
    with pytest.raises(ValueError, match=r"read the symbolic size .* as a number: it is 1"):
        b.done(sum_)


def test_a_symbolic_size_that_a_call_fixes_is_an_error() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "n", 4)
    count = int(shape_of(x)[0])
    c = b.const("c", torch.ones(count, 1))
    with pytest.raises(ValueError, match=r"read the symbolic size 'n' as a number: it is 5"):
        b.done(b.call(aten.mul.Tensor, x, c))
