from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    calls,
    codes,
    finish,
    golden,
    refusal,
    scales,
)
from torch.fx import Node

from qfuse.capture import capture
from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.ir.ops import library as ops
from qfuse.normalize import normalize
from qfuse.normalize.aten.qdq.merge_weights import MergeWeights
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_channel, per_tensor

RULE = MergeWeights()
ROWS, TENSOR = str(per_channel(2)), str(per_tensor(2))


class Weights:
    """A graph with weights of 8 features."""

    def __init__(self) -> None:
        self.b = GraphBuilder()
        self.count = 0

    def weight(self, rows: int, spec: str = ROWS, *grid: int) -> Node:
        """Add a dequantized weight."""
        self.count += 1
        name = f"w{self.count}"
        scale = self.b.const(f"{name}_s", scales(*(grid or (rows, 1))))
        return self.b.call(ops.dequantize, self.b.const(name, codes(rows, 8)), scale, None, spec)

    def linear(self, *parts: Node, axis: int = 0) -> CapturedGraph:
        """Multiply an input of 8 features by the joined weights."""
        weight = self.b.call(aten.cat.default, list(parts), axis)
        if axis == 1:
            weight = self.b.call(aten.slice.Tensor, weight, 1, 0, 8)
        x = self.b.arg("x", torch.float32, 3, 8)
        return finish(self.b, self.b.call(aten.linear.default, x, weight))


def test_golden() -> None:
    a = Weights()
    assert_expected_inline(
        golden(a.linear(a.weight(4), a.weight(2)), RULE),
        """\
const %w1_joined: int8[6, 8]
const %w1_scale: float32[6, 1]
%0 = qfuse.dequantize(%w1_joined, %w1_scale, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[6, 8]
%x: float32[3, 8]
%1 = aten.linear(%x, %0): float32[3, 6]
return (%1)
fired: merge-weights 1""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("second", [(ROWS, 2, 1), (TENSOR, 1, 1)], ids=["rows", "tensor"])
def test_scales_of_rows_and_of_a_whole_part(second: tuple[str, int, int]) -> None:
    a = Weights()
    program = a.linear(a.weight(4), a.weight(2, *second), a.weight(3, TENSOR, 1, 1))

    assert assert_same_values(program, [torch.randn(3, 8)], RULE, exact=True).fired
    assert calls(program).count("qfuse.dequantize") == 1


@pytest.mark.numeric
def test_weights_with_and_without_zero_points() -> None:
    def forward(m: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        first = (m.get_buffer("w").float() - m.get_buffer("z")) * m.get_buffer("s")
        return x @ torch.cat([first, m.get_buffer("v").float() * 0.01]).t()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", codes(4, 8))
            self.register_buffer("v", codes(2, 8))
            self.register_buffer("z", torch.randint(-5, 5, (4, 1)).float())
            self.register_buffer("s", scales(4, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(self, x)

    program = normalize(capture(Model(), (torch.randn(3, 8),)))
    assert calls(program).count("qfuse.dequantize") == 1
    assert "aten.cat" not in calls(program)


def test_refuses_blocks_that_differ() -> None:
    a = Weights()
    groups = ROWS.replace(" 1x* ", " 1x4 ")
    assert (
        refusal(a.linear(a.weight(4), a.weight(2, groups, 2, 2)), RULE)[0] is MissCode.GRANULARITY
    )


def test_refuses_a_weight_that_others_read() -> None:
    a = Weights()
    first = a.weight(4)
    a.b.call(aten.sin.default, first)
    assert refusal(a.linear(first, a.weight(2)), RULE)[0] is MissCode.SHARED


@pytest.mark.numeric
def test_parts_of_rows_with_the_same_scales() -> None:
    a = Weights()
    scale = scales(4, 1)
    parts = [
        a.b.call(
            ops.dequantize, a.b.const(f"p{i}", codes(4, k)), a.b.const(f"s{i}", scale), None, ROWS
        )
        for i, k in enumerate((3, 5))
    ]
    program = a.linear(*parts, axis=-1)

    assert assert_same_values(program, [torch.randn(3, 8)], RULE, exact=True).fired
    assert calls(program).count("qfuse.dequantize") == 1


def test_refuses_parts_of_rows_with_other_scales() -> None:
    a = Weights()
    program = a.linear(a.weight(4), a.weight(4), axis=1)
    assert refusal(program, RULE)[0] is MissCode.GRANULARITY


def test_refuses_a_float_part() -> None:
    a = Weights()
    program = a.linear(a.weight(4), a.b.const("f", torch.randn(2, 8)))
    assert refusal(program, RULE)[0] is MissCode.PATTERN


@pytest.mark.numeric
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("zero", [False, True])
def test_a_stack_has_the_scales_of_each_part(axis: int, zero: bool) -> None:
    a = Weights()
    parts = []
    for i in range(2):
        points = a.b.const(f"z{i}", torch.randint(-5, 5, (4, 1)).int()) if zero and i else None
        q, scale = a.b.const(f"p{i}", codes(4, 8)), a.b.const(f"s{i}", scales(4, 1))
        parts.append(a.b.call(ops.dequantize, q, scale, points, ROWS))
    x = a.b.arg("x", torch.float32, 4, 8)
    y = a.b.call(aten.mul.Tensor, a.b.call(aten.stack.default, parts, axis), 2.0)
    program = finish(a.b, a.b.call(aten.add.Tensor, y, a.b.call(aten.sum.default, x)))

    assert assert_same_values(program, [torch.randn(4, 8)], RULE, exact=True).fired
    assert calls(program).count("qfuse.dequantize") == 1


def test_refuses_a_stack_of_rows_and_a_tensor() -> None:
    a = Weights()
    stack = a.b.call(aten.stack.default, [a.weight(4), a.weight(4, TENSOR, 1, 1)])
    program = finish(a.b, a.b.call(aten.relu.default, stack))
    assert refusal(program, RULE)[0] is MissCode.GRANULARITY
