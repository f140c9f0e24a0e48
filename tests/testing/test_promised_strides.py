"""Strides of symbolic sizes are compared as numbers."""

from __future__ import annotations

import pytest
import torch

from qfuse.testing.source import Source, assert_same_bits, promised_strides

aten = torch.ops.aten


def test_strides_of_symbolic_sizes_are_those_of_the_inputs() -> None:
    source = Source()
    x = source.arg(torch.randn(3, 5, 2), ["b", "m", 2])
    turned = source.b.call(aten.permute.default, x, [1, 0, 2])
    program = source.done(turned)

    fake, real = turned.meta["val"], source.inputs[0].permute(1, 0, 2)
    assert promised_strides(program, source.inputs, fake, real) == [2, 10, 1]
    assert promised_strides(program, [torch.randn(7, 4, 2)], fake, real) == [2, 8, 1]


def test_an_empty_tensor_has_none() -> None:
    source = Source()
    x = source.arg(torch.randn(0, 5), ["b", 5])
    program = source.done(source.b.call(aten.neg.default, x))

    fake, real = x.meta["val"], source.inputs[0]
    assert promised_strides(program, source.inputs, fake, real) == []


def test_a_fake_kernel_that_says_other_strides_is_found() -> None:
    source = Source()
    x = source.arg(torch.randn(3, 5), ["b", 5])
    out = source.b.call(aten.neg.default, x)
    # As if the kernel returned the transpose of what it says.
    out.meta["val"] = out.meta["val"].t().contiguous().t()

    with pytest.raises(AssertionError, match="has the strides"):
        assert_same_bits(source, out)


def test_a_graph_with_symbolic_sizes_keeps_its_bits() -> None:
    source = Source()
    x = source.arg(torch.randn(3, 5, 2), ["b", "m", 2])
    assert_same_bits(source, source.b.call(aten.transpose.int, x, 0, 1))
