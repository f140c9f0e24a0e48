from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    codes,
    finish,
    golden,
    refusal,
    scales,
)
from torch.fx import Node

from qfuse.capture import capture
from qfuse.ir.events import MissCode
from qfuse.normalize import normalize
from qfuse.normalize.aten.views.lift_movement import LiftMovement
from qfuse.testing.build import GraphBuilder

RULE = LiftMovement()


def stored(b: GraphBuilder, dtype: torch.dtype = torch.int8) -> Node:
    """Add a stored weight that is cast."""
    values = codes(6, 8) if dtype is torch.int8 else torch.randint(0, 99, (6, 8)).to(dtype)
    return b.call(aten._to_copy.default, b.const("w", values), dtype=torch.float32)


def test_golden() -> None:
    b = GraphBuilder()
    w = b.call(aten.sub.Tensor, stored(b), 3)
    w = b.call(aten.mul.Tensor, b.call(aten.t.default, w), b.const("s", scales(1, 6)))
    y = b.call(aten.mm.default, b.arg("x", torch.float32, 3, 8), w)
    assert_expected_inline(
        golden(finish(b, y), RULE),
        """\
const %w: int8[6, 8]
%0 = aten.permute(%w, (1, 0)): int8[8, 6]
%1 = aten._to_copy(%0, dtype=float32): float32[8, 6]
%2 = aten.sub.Tensor(%1, 3): float32[8, 6]
const %s: float32[1, 6]
%3 = aten.mul.Tensor(%2, %s): float32[8, 6]
%x: float32[3, 8]
%4 = aten.mm(%x, %3): float32[3, 6]
return (%4)
fired: lift-movement 1""",
    )


View = Callable[[torch.Tensor], torch.Tensor]
VIEWS: dict[str, tuple[View, tuple[int, ...]]] = {
    "transpose": (lambda w: w.t(), (1, 6)),
    "rows": (lambda w: w[1:5].t(), (1, 4)),
    "steps": (lambda w: w[::2].t(), (1, 3)),
    "columns": (lambda w: w.t()[:, 2:], (1, 4)),
    "select": (lambda w: w.view(2, 3, 8)[1].t(), (1, 3)),
}


@pytest.mark.numeric
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("zero", [None, 3, "tensor"])
def test_a_view_between_the_cast_and_the_scale(name: str, zero: Any) -> None:
    view, grid = VIEWS[name]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", codes(6, 8))
            self.register_buffer("s", scales(*grid))
            self.register_buffer("z", torch.tensor(5.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            w = self.get_buffer("w").float()
            if zero == "tensor":
                w = w - self.get_buffer("z")
            elif zero is not None:
                w = w - zero
            return x @ (view(w) * self.get_buffer("s"))

    model, x = Model(), torch.randn(3, 8)
    program = normalize(capture(model, (x,)))
    names = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]

    assert names == ["qfuse.dequantize.default", "aten.linear.default"]
    torch.testing.assert_close(program.module(x)[0], model(x))


@pytest.mark.numeric
def test_values_are_the_same_bits() -> None:
    b = GraphBuilder()
    w = b.call(aten.permute.default, b.call(aten.sub.Tensor, stored(b), 3), [1, 0])
    w = b.call(aten.slice.Tensor, w, 1, 2, 5)
    y = b.call(aten.mm.default, b.arg("x", torch.float32, 3, 8), w)
    assert assert_same_values(finish(b, y), [torch.randn(3, 8)], RULE, exact=True).fired


def test_refuses_what_is_not_stored() -> None:
    b = GraphBuilder()
    b.call(aten.relu.default, b.call(aten.t.default, stored(b, torch.int64)))
    assert refusal(finish(b, b.arg("x", torch.float32, 3)), RULE)[0] is MissCode.PATTERN


def test_refuses_a_zero_point_that_adds_an_axis() -> None:
    b = GraphBuilder()
    w = b.call(aten.sub.Tensor, stored(b), b.const("z", torch.ones(1, 1, 1)))
    y = b.call(aten.relu.default, b.call(aten.transpose.int, w, 1, 2))
    assert refusal(finish(b, y), RULE)[0] is MissCode.PATTERN


@pytest.mark.parametrize(
    ("q", "zero"),
    [(codes(6, 8), torch.ones(1, 1)), (codes(6), torch.tensor(3.0, dtype=torch.float64))],
    ids=["axes", "dtype"],
)
def test_refuses_a_zero_point_that_would_change_the_type(
    q: torch.Tensor, zero: torch.Tensor
) -> None:
    b = GraphBuilder()
    w = b.call(aten._to_copy.default, b.const("w", q), dtype=torch.float32)
    w = b.call(aten.sub.Tensor, w, b.const("z", zero))
    y = b.call(aten.add.Tensor, b.call(aten.select.int, w, 0, 1), b.arg("x", torch.float32, 8))
    assert refusal(finish(b, y), RULE)[0] is MissCode.SHAPE


def test_refuses_bounds_of_run_time() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "m", 8)
    size = b.call(aten.sym_size.int, x, 0)
    part = b.call(aten.slice.Tensor, stored(b), 0, 0, size)
    y = b.call(aten.relu.default, part)
    assert refusal(finish(b, y), RULE)[0] is MissCode.NOT_CONSTANT


def test_refuses_a_view_that_leaves_the_graph() -> None:
    b = GraphBuilder()
    y = b.call(aten.t.default, stored(b))
    assert refusal(finish(b, b.arg("x", torch.float32, 3), y), RULE)[0] is MissCode.SHARED
