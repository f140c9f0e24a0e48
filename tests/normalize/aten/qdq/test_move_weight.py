from __future__ import annotations

from collections.abc import Callable

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

from qfuse.ir.events import MissCode
from qfuse.ir.ops import library as ops
from qfuse.normalize.aten.qdq.move_weight import MoveWeight
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_channel, per_tensor
from qfuse.testing.run import random_inputs

RULE = MoveWeight()
ROWS, TENSOR = str(per_channel(2)), str(per_tensor(2))
FLOAT8_ROWS = ROWS.replace("int8[-128,127]", "float8_e4m3fn[-448,448]")
GROUPS = ROWS.replace(" 1x* ", " 1x4 ")


def weight(b: GraphBuilder, spec: str = ROWS, *grid: int, dtype: torch.dtype = torch.int8) -> Node:
    """Add a dequantized weight [6, 8]."""
    scale = b.const("s", scales(*(grid or (6, 1))))
    q = codes(6, 8) if dtype is torch.int8 else torch.randn(6, 8).to(dtype)
    return b.call(ops.dequantize, b.const("w", q), scale, None, spec)


def multiplied(b: GraphBuilder, w: Node) -> Node:
    """Multiply an input by a weight."""
    return b.call(aten.matmul.default, b.arg("x", torch.float32, 3, w.meta["val"].shape[0]), w)


def test_golden() -> None:
    b = GraphBuilder()
    y = multiplied(b, b.call(aten.slice.Tensor, weight(b), 0, 2, 6))
    assert_expected_inline(
        golden(finish(b, y), RULE),
        """\
const %s: float32[6, 1]
const %w: int8[6, 8]
%0 = aten.slice.Tensor(%w, 0, 2, 6, 1): int8[4, 8]
%1 = aten.slice.Tensor(%s, 0, 2, 6, 1): float32[4, 1]
%2 = qfuse.dequantize(%0, %1, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[4, 8]
%x: float32[3, 4]
%3 = aten.matmul(%x, %2): float32[3, 8]
return (%3)
fired: move-weight 1""",
    )


Move = Callable[[GraphBuilder, Node], Node]
MOVES: dict[str, Move] = {
    "rows": lambda b, w: b.call(aten.slice.Tensor, w, 0, 1, 5),
    "columns": lambda b, w: b.call(aten.slice.Tensor, w, 1, 4, 8),
    "select": lambda b, w: b.call(aten.unsqueeze.default, b.call(aten.select.int, w, 0, -2), 1),
    "index": lambda b, w: b.call(aten.index.Tensor, w, [b.const("i", torch.tensor([3, 0, 3]))]),
    "index_select": lambda b, w: b.call(
        aten.index_select.default, w, 1, b.const("i", torch.tensor([7, 0, 1]))
    ),
    "embedding": lambda b, w: b.call(aten.embedding.default, w, b.const("i", torch.tensor([5, 1]))),
    "flip": lambda b, w: b.call(aten.flip.default, w, [0, 1]),
    "roll": lambda b, w: b.call(aten.roll.default, w, [2], [0]),
}
GRIDS = {
    "rows": (ROWS, 6, 1),
    "tensor": (TENSOR, 1, 1),
    "groups": (GROUPS, 6, 2),
    "float8": (FLOAT8_ROWS, 6, 1),
}


@pytest.mark.numeric
@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("grid", GRIDS)
def test_values_are_the_same_bits(name: str, grid: str) -> None:
    b = GraphBuilder()
    dtype = torch.float8_e4m3fn if grid == "float8" else torch.int8
    y = multiplied(b, MOVES[name](b, weight(b, *GRIDS[grid], dtype=dtype)))
    program = finish(b, y)
    x = random_inputs(program)
    if grid == "groups" and name == "index_select":
        # Columns of several groups in any order.
        assert refusal(program, RULE)[0] is MissCode.GRANULARITY
        return
    assert assert_same_values(program, x, RULE, exact=True).fired
    names = calls(program)
    assert names.index("qfuse.dequantize") >= len(names) - 3


def test_refuses_ids_of_run_time() -> None:
    b = GraphBuilder()
    rows = b.call(aten.embedding.default, weight(b), b.arg("ids", torch.int64, 4))
    assert refusal(finish(b, rows), RULE)[0] is MissCode.NOT_CONSTANT


def test_refuses_an_activation() -> None:
    b = GraphBuilder()
    q = b.arg("q", torch.int8, 6, 8)
    x = b.call(ops.dequantize, q, b.const("s", scales(6, 1)), None, ROWS)
    part = b.call(aten.slice.Tensor, x, 0, 2, 6)
    assert refusal(finish(b, part), RULE)[0] is MissCode.NOT_CONSTANT


def test_refuses_a_copy_of_a_weight_with_other_users() -> None:
    b = GraphBuilder()
    w = weight(b)
    flipped = b.call(aten.flip.default, w, [0])
    assert refusal(finish(b, multiplied(b, flipped), w), RULE)[0] is MissCode.SHARED


def test_refuses_a_copy_that_is_larger_than_the_weight() -> None:
    b = GraphBuilder()
    rows = b.call(aten.embedding.default, weight(b), b.const("i", torch.randint(0, 6, (4, 4))))
    y = b.call(aten.add.Tensor, rows, b.arg("x", torch.float32, 8))
    assert refusal(finish(b, y), RULE)[0] is MissCode.PROFIT


def test_refuses_a_part_of_a_group() -> None:
    b = GraphBuilder()
    y = multiplied(b, b.call(aten.slice.Tensor, weight(b, GROUPS, 6, 2), 1, 2, 8))
    assert refusal(finish(b, y), RULE)[0] is MissCode.GRANULARITY


def test_refuses_what_moves_nothing() -> None:
    b = GraphBuilder()
    y = b.call(aten.flip.default, b.arg("x", torch.float32, 3), [0])
    assert refusal(finish(b, y), RULE)[0] is MissCode.PATTERN
