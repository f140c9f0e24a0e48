"""Elementwise values that several kernels read are stored once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Node

import qfuse
from qfuse.backends.prepare import prepare

pytestmark = [pytest.mark.own_kernels, pytest.mark.numeric, pytest.mark.isa("avx2")]

aten = torch.ops.aten
Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def attend(q: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q.sin(), q.cos(), attn_mask=mask)


def twice(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return attend(attend(q, mask), mask)


def kept_as_result(q: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mask = m * -9.0
    return twice(q, mask), mask


def of_images(q: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """A value whose memory is that of channels-last images, before two kernels."""
    images = F.avg_pool2d(q.to(memory_format=torch.channels_last), 1).relu()
    return attend(images) + attend(images, m)


STORED: dict[str, Function] = {
    "one mask": lambda q, m: twice(q, m * -9.0),
    "by other views": lambda q, m: attend(attend(q, (y := m * -9.0)), y.view(2, 1, 20, 20)),
    "by views of views": lambda q, m: twice(q, (m * -9.0).expand(2, 4, 20, 20).unsqueeze(0)[0]),
    "a comparison": lambda q, m: twice(q, m > 0.5),
    "a cast": lambda q, m: twice(q, m.round().cumsum(3).bool()),
    "queries too": lambda q, m: attend(y := q + 1) + attend(y, m),
    "from a view": lambda q, m: twice(q, m.transpose(2, 3).contiguous().exp()),
}
OTHERS: dict[str, Function] = {
    "of one kernel": lambda q, m: attend(q, m * -9.0),
    "twice in one kernel": lambda q, m: F.scaled_dot_product_attention(y := q + 1, y, y, m),
    "an input": twice,
    "a view": lambda q, m: twice(q, m.transpose(2, 3)),
    "another order of axes": lambda q, m: twice(q, m.transpose(2, 3) * 2),
    "a sum": lambda q, m: twice(q, m.cumsum(3)),
    "a result": kept_as_result,  # type: ignore[dict-item]
    "images": of_images,
}


class Applied(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self._function = function

    def forward(self, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self._function(q, mask)


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 4, 20, 16), torch.rand(2, 1, 20, 20)


def stored(fast: qfuse.CompiledModel) -> list[Node]:
    """The values that the program stores."""
    graph = prepare(fast.plan.lowered).module.graph
    return [node for node in graph.nodes if node.target is aten.as_strided.default]


@pytest.mark.parametrize("name", [*STORED, *OTHERS])
def test_which_values_are_stored(name: str) -> None:
    module = Applied((STORED | OTHERS)[name])
    fast = qfuse.compile(module, operands(), options={"backend": "eager"})

    assert len(stored(fast)) == (1 if name in STORED else 0)
    inputs = operands()
    torch.testing.assert_close(fast(*inputs), module(*inputs), rtol=1e-5, atol=1e-6)


def test_values_are_those_of_the_source() -> None:
    """Compiled too, with every value of the tables in one graph."""

    class All(torch.nn.Module):
        def forward(self, q: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
            functions = (STORED | OTHERS).values()
            return list(torch.utils._pytree.tree_leaves([f(q, mask) for f in functions]))

    module = All()
    fast = qfuse.compile(module, operands())

    assert fast.backend == "aoti"
    inputs = operands()
    for answer, expected in zip(fast(*inputs), module(*inputs), strict=True):
        torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-6)


def test_dynamic_sizes_are_left_to_the_compiler() -> None:
    module = Applied(STORED["one mask"])
    batch = torch.export.Dim("batch", min=2, max=8)
    shapes = {"q": {0: batch}, "mask": {0: batch}}
    fast = qfuse.compile(module, operands(), dynamic_shapes=shapes)

    assert stored(fast) == []
    q, mask = torch.randn(3, 4, 20, 16), torch.rand(3, 1, 20, 20)
    torch.testing.assert_close(fast(q, mask), module(q, mask), rtol=1e-5, atol=1e-6)
