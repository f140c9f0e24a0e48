from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import assert_same_values, aten, finish, golden, refusal

from qfuse.ir.events import MissCode
from qfuse.ir.ops import library as ops
from qfuse.normalize.aten.views.lift_size import LiftSize
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_tensor


def test_golden_a_size_is_read_of_the_input() -> None:
    b = GraphBuilder()
    q = b.arg("q", torch.int8, "b", 3, "s")
    scale = b.const("scale", torch.full((1, 1, 1), 0.05))
    x = b.call(ops.dequantize, q, scale, None, str(per_tensor(3)))
    y = b.call(aten.transpose.int, b.call(aten.relu.default, x), 1, 2)
    size = b.call(aten.sym_size.int, y, 1)
    y = b.call(aten.reshape.default, y, [-1, size, 1, 3])

    assert_expected_inline(
        golden(finish(b, y), LiftSize()),
        """\
%q: int8[s0, 3, s1]
const %scale: float32[1, 1, 1]
%0 = qfuse.dequantize(%q, %scale, None, 'int8[-128,127] *x*x* float32 float32:reciprocal:round-zp int'): float32[s0, 3, s1]
%1 = aten.relu(%0): float32[s0, 3, s1]
%2 = aten.transpose.int(%1, 1, 2): float32[s0, s1, 3]
%3 = aten.sym_size.int(%q, 2): SymInt
%4 = aten.reshape(%2, (-1, %3, 1, 3)): float32[s0, s1, 1, 3]
return (%4)
fired: lift-size 1""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_size_that_is_made_stays_and_one_that_is_kept_is_lifted(batch: int) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "b", 4, "s")
    y = b.call(aten.relu.default, b.call(aten.constant_pad_nd.default, x, [1, 2], 0.0))
    sizes = [b.call(aten.sym_size.int, y, axis) for axis in (0, 2)]
    program = finish(b, b.call(aten.reshape.default, y, [sizes[0], sizes[1], 4]))

    result = assert_same_values(program, [torch.randn(batch, 4, 7)], LiftSize(), exact=True)

    assert result.fired["lift-size"] == 2
    read = {n.args[0].name: n.args[1] for n in program.graph.nodes if n.target is aten.sym_size.int}
    assert read == {"x": 0, "constant_pad_nd_default": 2}


@pytest.mark.numeric
def test_the_size_of_a_part_is_read_before_the_split() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "b", 6)
    split = b.call(aten.split.Tensor, x, 3, 1)
    parts = [b.item(split, index) for index in range(2)]
    size = b.call(aten.sym_size.int, parts[1], 0)
    program = finish(b, b.call(aten.reshape.default, parts[0], [3, size]))

    assert_same_values(program, [torch.randn(5, 6)], LiftSize(), exact=True)
    (read,) = [n for n in program.graph.nodes if n.target is aten.sym_size.int]
    assert read.args == (next(iter(program.graph.nodes)), 0)


def test_refuses_a_size_that_no_operand_has() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "b", "s")
    y = b.call(aten.cat.default, [x, x], 0)
    size = b.call(aten.sym_size.int, y, 0)
    program = finish(b, b.call(aten.reshape.default, y, [-1, size]))

    assert refusal(program, LiftSize()) == (MissCode.PATTERN, "sym_size_int")


def test_refuses_sizes_of_which_only_the_examples_are_equal() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "b", 4)
    other = b.arg("y", torch.float32, "c", 4)
    y = b.call(aten.mm.default, other, b.call(aten.t.default, x))
    size = b.call(aten.sym_size.int, y, 0)
    program = finish(b, b.call(aten.reshape.default, y, [size, -1]))
    golden(program, LiftSize())

    (read,) = [n for n in program.graph.nodes if n.target is aten.sym_size.int]
    assert read.args == (other, 0)
