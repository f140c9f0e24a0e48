from __future__ import annotations

import torch
from tests.support.cases.convolution import Conv, merge, siblings

from qfuse.testing.quant import per_channel

aten = torch.ops.aten
INT8 = per_channel(4)


def test_the_reason_names_the_sibling_and_what_differs() -> None:
    program = siblings(Conv(3, INT8), Conv(2, INT8, settings=([1, 1], [1, 0])))
    first, second = [n.name for n in program.graph.nodes if n.target is aten.conv2d.default]
    reasons = [miss.reason for _, miss in merge(program, b=2).misses]

    assert reasons == [
        f"the closest of its siblings, %{second}, differs in padding ((1, 0), not (0, 0))",
        f"the closest of its siblings, %{first}, differs in padding ((0, 0), not (1, 0))",
    ]
