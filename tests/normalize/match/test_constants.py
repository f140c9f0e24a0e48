from __future__ import annotations

import torch
from tests.support.sources.aten_spellings import aten, finish

from qfuse.ir.ops import library as ops
from qfuse.ir.ops.constants import constant_value, is_constant_expression, number_of
from qfuse.normalize.match.constants import derived, evaluated, is_unit, parameter_value
from qfuse.rewrite.rewriter import GraphEditor
from qfuse.testing.build import GraphBuilder


def test_values_are_what_the_ops_compute() -> None:
    b = GraphBuilder()
    scale = torch.rand(4, 1)
    node = b.call(aten._to_copy.default, b.const("s", scale), dtype=torch.bfloat16)
    node = b.call(aten.reciprocal.default, b.call(aten.view.default, node, (4,)))
    value = constant_value(node)

    assert value is not None
    assert torch.equal(value, scale.bfloat16().reshape(4).reciprocal())


def test_what_depends_on_an_input_or_is_written_has_no_value() -> None:
    b = GraphBuilder()
    x, s = b.arg("x", torch.float32, 4), b.const("s", torch.rand(4))
    written = b.const("t", torch.rand(4))
    written.meta["qfuse_mutable"] = True

    assert constant_value(b.call(aten.mul.Tensor, x, s)) is None
    assert constant_value(b.call(aten.neg.default, written)) is None
    assert constant_value(b.const("m", torch.empty(4, device="meta"))) is None


def test_numbers_are_not_truth_values() -> None:
    b = GraphBuilder()

    assert number_of(3) == 3
    assert number_of(b.const("s", torch.tensor([[0.5]]))) == 0.5
    assert number_of(True) is None
    assert number_of(b.const("t", torch.tensor(True))) is None
    assert number_of(b.const("v", torch.rand(2))) is None


def test_units_are_ones_by_construction() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4)

    assert is_unit(b.const("one", torch.ones(1, 1)))
    assert is_unit(b.call(aten.ones_like.default, x))
    assert not is_unit(b.const("ones", torch.ones(2)))
    assert not is_unit(b.const("less", torch.tensor(0.5)))
    assert not is_unit(x)


def test_an_expression_of_constants_is_bounded() -> None:
    b = GraphBuilder()
    w = b.const("w", torch.rand(4, 4))
    small = b.call(aten.t.default, b.call(aten.neg.default, w))
    large = w
    for _ in range(70):
        large = b.call(aten.neg.default, large)

    assert is_constant_expression(small)
    assert not is_constant_expression(large)
    assert not is_constant_expression(b.call(aten.mul.Tensor, w, b.arg("x", torch.float32, 4)))


def test_parts_of_a_constant_are_written_to_zeros() -> None:
    b = GraphBuilder()
    w, zeros = b.const("w", torch.rand(2, 4)), b.call(aten.zeros.default, [4, 4])
    written = b.call(aten.slice_scatter.default, zeros, w, 0, 1, 3)
    cleared = b.call(aten.zeros_like.default, b.arg("x", torch.float32, 4, 4))

    assert is_constant_expression(written)
    assert not is_constant_expression(zeros)
    assert not is_constant_expression(b.call(aten.slice_scatter.default, cleared, w, 0, 1, 3))


def test_derived_constants_are_made_once_and_share_memory() -> None:
    b = GraphBuilder()
    weight = torch.rand(4, 8)
    w = b.const("w", weight)
    y = b.call(aten.relu.default, w)
    program = finish(b, y)
    rw = GraphEditor(program.module).rewriter("test", y)

    first, again = derived(rw, w, weight.t(), "t"), derived(rw, w, weight.t(), "t")
    same = derived(rw, w, weight.clone(), "copy")
    other = derived(rw, w, weight.t() + 1, "t")

    assert first.target == again.target == "w_t"
    assert program.module.get_buffer("w_t").data_ptr() == weight.data_ptr()
    assert same.target == "w"
    assert other.target not in {"w", "w_t"}


def test_parameters_that_are_quantized_themselves_are_known() -> None:
    b = GraphBuilder()
    one, stored = b.const("one", torch.full((1,), 0.25)), b.const("q", torch.arange(4).char())
    spec = "int8[-128,127] * float32 float32:reciprocal:round-zp none"
    scale = b.call(ops.dequantize, stored, one, None, spec)
    offset = b.call(aten.add.Tensor, scale, 1.0)
    x = b.call(aten.add.Tensor, scale, b.arg("x", torch.float32, 4))

    known = parameter_value(offset)
    assert known is not None
    assert torch.equal(known, torch.arange(4) * 0.25 + 1)
    assert constant_value(offset) is None
    assert parameter_value(x) is None
    assert parameter_value(0.5) is None


def test_memory_that_is_written_later_counts_as_zeros() -> None:
    b = GraphBuilder()
    rows = torch.rand(2, 4)
    w, memory = b.const("w", rows), b.call(aten.empty.memory_format, [4, 4])
    first = b.call(aten.slice_scatter.default, memory, w, 0, 0, 4, 2)

    assert is_constant_expression(first)
    value = evaluated(first)
    assert value is not None
    assert torch.equal(value[::2], rows)
    assert torch.equal(value[1::2], torch.zeros(2, 4))
