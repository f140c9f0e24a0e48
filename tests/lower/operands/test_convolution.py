"""What kernels of convolutions add behind their call."""

from __future__ import annotations

import pytest
import torch

from qfuse.ir.ops.views import tensor_of
from qfuse.lower.operands.convolution import with_strides_of
from qfuse.rewrite.rewriter import GraphEditor
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten


@pytest.mark.numeric
@pytest.mark.parametrize("size", ["h", 5])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_single_channel_has_the_stride_of_the_source(
    size: str | int, channels_last: bool
) -> None:
    """It tells the next convolution the layout of its result, and costs no copy."""
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, 1, size, 6)
    rows, image = (
        b.call(aten.clone.default, x, memory_format=memory_format)
        for memory_format in (torch.contiguous_format, torch.channels_last)
    )
    last = b.call(aten.relu.default, image)
    program = b.done(last)
    old, new = (image, rows) if channels_last else (rows, image)
    rw = GraphEditor(program.module).rewriter("test", last)

    made = with_strides_of(old, new, rw)
    program.graph.output_node().args = ((old, made),)
    program.module.recompile()

    (x_value,) = random_inputs(program, h=7)
    expected, found = run(program, [x_value])
    assert tensor_of(made).stride(1) == tensor_of(old).stride(1)
    assert found.stride() == expected.stride()
    assert torch.equal(found, expected)
    assert aten.clone.default not in [n.target for n in program.graph.nodes if n not in (old, new)]
