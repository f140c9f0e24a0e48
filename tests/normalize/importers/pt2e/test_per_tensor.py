from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from tests.support.sources.dialects import (
    FLOATS,
    INTEGERS,
    SEEDS,
    Source,
    assert_same_bits,
    codes,
    fired,
    hard_numbers,
    only_miss,
    ops_of,
    run,
    scales,
)
from tests.support.sources.qparams import assert_never_runs
from torch.fx import Node

from qfuse.ir.errors import BlockError
from qfuse.ir.events import MissCode, Noted
from qfuse.ir.graph.stage_graph import MODULE_META, MUTABLE_META, SOURCE_META
from qfuse.ir.graph.text import to_text
from qfuse.ir.quant.spec import dtype_range
from qfuse.normalize import normalize

d = torch.ops.quantized_decomposed
SHAPES = st.sampled_from([(), (1,), (0, 4), (7,), (3, 5), (1, 1, 9), (2, 3, 4, 5)])
SCALES = st.one_of(
    st.floats(1e-7, 1e6, allow_subnormal=False),
    st.sampled_from([0.0123, 0.1, 2.0**-7, 1 / 3, 1e-38]),
)


def ranges(dtype: torch.dtype) -> st.SearchStrategy[tuple[int, int]]:
    low, high = dtype_range(dtype)
    return st.sampled_from([(low, high), (low // 2, high // 2), (min(0, low + 1), high)])


def as_tensors(
    source: Source, overload: str, numbers: list[Any], scale: Node, zero: Node
) -> list[Any]:
    """The arguments of an overload that takes the parameters, and maybe the bounds, as tensors."""
    low, high = numbers[2:]
    if overload == "tensor":
        return [scale, zero, low, high]
    ends = {"low": torch.tensor(low), "high": torch.tensor([high])}
    return [scale, zero, *(source.b.const(name, end) for name, end in ends.items())]


def test_golden_literals_become_constants() -> None:
    source = Source()
    x = source.b.arg("x", torch.float32, "B", 8)
    q = source.b.call(d.quantize_per_tensor.default, x, 0.02, 128, 0, 255, torch.uint8)
    y = source.b.call(
        d.dequantize_per_tensor.default,
        q,
        0.02,
        128,
        0,
        255,
        torch.uint8,
        out_dtype=torch.bfloat16,
    )
    program = normalize(source.done(y))

    assert fired(program) == ["normalize-quantize-per-tensor", "normalize-dequantize-per-tensor"]
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 8]
const %quantize_per_tensor_default_scale: float64[1, 1]
const %quantize_per_tensor_default_zero_point: int64[1, 1]
%0 = qfuse.quantize(%x, %quantize_per_tensor_default_scale, %quantize_per_tensor_default_zero_point, 'uint8[0,255] *x* float32 float32:reciprocal:round-zp int'): uint8[s0, 8]
%1 = qfuse.dequantize(%0, %quantize_per_tensor_default_scale, %quantize_per_tensor_default_zero_point, 'uint8[0,255] *x* bfloat16 float32:reciprocal:round-zp int'): bfloat16[s0, 8]
return (%1)""",
    )


@pytest.mark.numeric
@pytest.mark.property
@given(st.data())
def test_quantize_has_the_bits_of_the_source(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(SEEDS))
    shape, dtype = data.draw(SHAPES), data.draw(st.sampled_from(INTEGERS))
    overload = data.draw(st.sampled_from(["default", "tensor", "tensor2"]))
    (low, high), value = data.draw(ranges(dtype)), data.draw(SCALES)
    zero = data.draw(st.integers(low - 3, high + 3))
    source = Source()
    x = source.arg(hard_numbers(shape, data.draw(st.sampled_from(FLOATS)), value))
    args: list[Any] = [value, zero, low, high]
    if overload != "default":
        kinds = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        # A float16 scale must stay above 0.
        kind = data.draw(st.sampled_from(kinds[: 3 if 1e-4 < value < 1e4 else 2]))
        form = data.draw(st.sampled_from([(), (1,), (1, 1)]))
        constant = data.draw(st.booleans())
        zero_type = data.draw(st.sampled_from([torch.int64, torch.int32]))
        tensors = torch.full(form, value, dtype=kind), torch.full(form, zero, dtype=zero_type)
        nodes = [source.either(tensor, constant=constant) for tensor in tensors]
        args = as_tensors(source, overload, args, *nodes)
    q = source.b.call(getattr(d.quantize_per_tensor, overload), x, *args, dtype)

    assert ops_of(assert_same_bits(source, q)) == ["quantize"]


@pytest.mark.numeric
@pytest.mark.property
@given(st.data())
def test_dequantize_has_the_bits_of_the_source(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(SEEDS))
    shape, dtype = data.draw(SHAPES), data.draw(st.sampled_from([*INTEGERS, torch.int32]))
    overload = data.draw(st.sampled_from(["default", "tensor", "tensor2"]))
    (low, high), value = data.draw(ranges(dtype)), data.draw(SCALES)
    zero = data.draw(st.integers(low, high))
    real = data.draw(st.sampled_from([None, torch.float64, *FLOATS]))
    source = Source()
    q = source.arg(codes(shape, dtype))
    args: list[Any] = [value, zero, low, high]
    if overload != "default":
        kind = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
        scale = source.either(
            torch.full((1,), value, dtype=kind), constant=data.draw(st.booleans())
        )
        args = as_tensors(
            source, overload, args, scale, source.b.const("zero", torch.tensor([zero]))
        )
    op = getattr(d.dequantize_per_tensor, overload)
    y = source.b.call(op, q, *args, dtype, out_dtype=real)

    program = assert_same_bits(source, y)
    wide = torch.iinfo(dtype).bits > 8
    assert ops_of(program) == ["dequantize"] or (wide and real in FLOATS[1:])


def test_refuses_float8_since_it_rounds_to_integers_first() -> None:
    source = Source()
    x = source.arg(torch.randn(3, 4))
    dtype = torch.float8_e4m3fn
    q = source.b.call(d.quantize_per_tensor.default, x, 0.1, 0, -448, 448, dtype)
    program = assert_same_bits(source, q)

    miss = only_miss(program)
    assert (miss.code, miss.anchor.node) == (MissCode.ARITHMETIC, q.name)
    assert ops_of(program, "quantized_decomposed") == ["quantize_per_tensor"]
    (note,) = program.log.of(Noted)
    assert note.warn
    assert note.text.startswith(
        "quantized_decomposed.quantize_per_tensor stays as it is: it rounds"
    )


def test_refuses_bounds_that_float32_rounds_out_of_the_type() -> None:
    source = Source()
    x = source.arg(torch.randn(3, 4))
    ends = torch.iinfo(torch.int32)
    q = source.b.call(d.quantize_per_tensor.default, x, 0.1, 0, ends.min, ends.max, torch.int32)

    miss = only_miss(assert_same_bits(source, q))
    assert miss.code is MissCode.ARITHMETIC
    assert miss.reason == "its bound 2147483647 is not exact in float32, in which it clamps"


def test_refuses_a_difference_that_bfloat16_rounds() -> None:
    source = Source()
    q = source.arg(codes((3, 4), torch.int16))
    full = (-32768, 32767, torch.int16)
    y = source.b.call(d.dequantize_per_tensor.default, q, 0.1, 3, *full, out_dtype=torch.bfloat16)

    miss = only_miss(assert_same_bits(source, y))
    assert miss.code is MissCode.ARITHMETIC
    assert miss.reason == "it subtracts the zero point in bfloat16, which may round"


def test_refuses_a_zero_point_that_may_be_anything_in_bfloat16() -> None:
    source = Source()
    q, zero = source.arg(codes((3, 4), torch.int8)), source.arg(torch.tensor([7]))
    scale = source.arg(scales((1,)))
    full = (-128, 127, torch.int8)
    op = d.dequantize_per_tensor.tensor
    y = source.b.call(op, q, scale, zero, *full, out_dtype=torch.bfloat16)

    assert only_miss(assert_same_bits(source, y)).code is MissCode.ARITHMETIC


def test_refuses_an_integer_scale() -> None:
    source = Source()
    x = source.arg(torch.randn(3, 4))
    one = source.b.const("one", torch.tensor([1]))
    q = source.b.call(d.quantize_per_tensor.tensor, x, one, one, -128, 127, torch.int8)

    assert only_miss(assert_same_bits(source, q)).code is MissCode.DTYPE


def test_refuses_bounds_that_are_known_only_at_run_time() -> None:
    source = Source()
    x, scale = source.arg(torch.randn(3, 4)), source.arg(scales((1,)))
    ends = [source.arg(torch.tensor(v)) for v in (0, -128, 127)]
    q = source.b.call(d.quantize_per_tensor.tensor2, x, scale, *ends, torch.int8)

    assert only_miss(assert_same_bits(source, q)).code is MissCode.NOT_CONSTANT


def test_refuses_a_number_that_is_known_only_at_run_time() -> None:
    source = Source()
    x, scale = source.arg(torch.randn(3, 4)), source.arg(scales((1,)))
    number = source.b.call(torch.ops.aten._local_scalar_dense.default, scale)
    q = source.b.call(d.quantize_per_tensor.default, x, 0.1, 0, -128, 127, torch.int8)
    q.update_arg(1, number)

    miss = only_miss(assert_same_bits(source, q))
    assert miss.code is MissCode.NOT_CONSTANT
    assert miss.reason == "the scale is a Python number that is known only at run time"


@pytest.mark.numeric
def test_a_scale_that_the_program_writes_is_not_taken_for_a_constant() -> None:
    source = Source()
    x, scale = source.arg(hard_numbers((3, 4), torch.float32)), source.b.const("s", scales((1,)))
    scale.meta[MUTABLE_META] = True
    zero = source.b.const("z", torch.tensor([0]))
    zero.meta[MUTABLE_META] = True
    q = source.b.call(d.quantize_per_tensor.tensor, x, scale, zero, -128, 127, torch.int8)
    program = assert_same_bits(source, q)

    assert ops_of(program, "aten") == ["view", "view"]
    for name, value in (("s", scales((1,))), ("z", torch.tensor([5]))):
        program.module.get_buffer(name).copy_(value)
    again = run(program, source.inputs)[0]
    s, z = program.module.get_buffer("s"), program.module.get_buffer("z")
    want = d.quantize_per_tensor.tensor(source.inputs[0], s, z, -128, 127, torch.int8)
    assert torch.equal(again, want)


@pytest.mark.parametrize("what", ["scale", "zero point"])
def test_a_parameter_of_two_numbers_is_an_error_at_the_users_line(what: str) -> None:
    source = Source()
    x = source.arg(torch.randn(3, 4))
    one, two = source.b.const("one", scales((1,))), source.b.const("two", scales((2,)))
    q = source.b.call(d.quantize_per_tensor.tensor, x, one, one, -128, 127, torch.int8)
    # The shape function refuses this, so such a graph comes from a tool that edits graphs.
    q.update_arg(1 if what == "scale" else 2, two)
    q.meta[SOURCE_META], q.meta[MODULE_META] = "model.py:7: y = self.fc(x)", "net.fc"

    with pytest.raises(BlockError, match=f"a {what} of shape") as caught:
        normalize(source.done(q))
    assert caught.value.where is not None
    assert "net.fc" in caught.value.where
    assert "model.py:7" in caught.value.where


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ((0.1, 0, -128, 200, torch.int8), "exceeds int8"),
        ((0.0, 0, -128, 127, torch.int8), "its scale is 0"),
        ((0.1, 0, 0, 10, torch.int64), "does not store int64"),
    ],
)
def test_what_can_never_run_is_an_error(args: tuple[object, ...], complaint: str) -> None:
    source = Source()
    x = source.arg(torch.randn(3, 4))
    user = source.b.call(d.quantize_per_tensor.default, x, *args)  # type: ignore[arg-type]

    assert_never_runs(source, user, complaint, AssertionError, ZeroDivisionError, ValueError)


def test_a_dtype_argument_that_is_not_the_tensors_is_an_error() -> None:
    source = Source()
    q = source.arg(codes((3, 4), torch.uint8))
    y = source.b.call(d.dequantize_per_tensor.default, q, 0.1, 0, -128, 127, torch.int8)

    assert_never_runs(source, y, "a dequantize of int8 is given uint8", AssertionError)


@pytest.mark.numeric
def test_a_float8_tensor_is_dequantized_in_float32() -> None:
    source = Source()
    q = source.arg(torch.randn(5, 7).to(torch.float8_e5m2))
    full = (-57344, 57344, torch.float8_e5m2)
    y = source.b.call(d.dequantize_per_tensor.default, q, 0.37, 3, *full)

    assert ops_of(assert_same_bits(source, y)) == ["dequantize"]
