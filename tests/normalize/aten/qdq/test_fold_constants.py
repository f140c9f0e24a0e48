from __future__ import annotations

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

from qfuse.ir.events import MissCode
from qfuse.ir.ops import library as ops
from qfuse.normalize.aten.qdq.fold_constants import FoldStored
from qfuse.testing.build import GraphBuilder

SPEC = "int8[-128,127] 1x* float32 float32:reciprocal:round-zp int"


def test_golden_moved_constants_are_constants() -> None:
    b = GraphBuilder()
    stored = codes(8, 4)
    q = b.call(aten.t.default, b.const("q", stored))
    scale = b.call(aten.unsqueeze.default, b.const("s", scales(4)), 1)
    zero = b.call(aten.zeros_like.default, scale, dtype=torch.int32)
    program = finish(b, b.call(ops.dequantize, q, scale, zero, SPEC))

    assert_expected_inline(
        golden(program, FoldStored()),
        """\
const %q_stored: int8[4, 8]
const %s_scale: float32[4, 1]
const %zeros_like_default_zero_point: int32[4, 1]
%0 = qfuse.dequantize(%q_stored, %s_scale, %zeros_like_default_zero_point, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[4, 8]
return (%0)
fired: fold-stored 1""",
    )
    assert program.module.get_buffer("q_stored").data_ptr() == stored.data_ptr()


def test_golden_unpacked_nibbles_are_unpacked_once() -> None:
    b = GraphBuilder()
    packed = b.const("packed", codes(4, 4, dtype=torch.uint8))
    low = b.call(aten.bitwise_and.Scalar, packed, 15)
    high = b.call(aten.__rshift__.Scalar, packed, 4)
    q = b.call(aten.view.default, b.call(aten.stack.default, [low, high], -1), (4, 8))
    q = b.call(aten._to_copy.default, q, dtype=torch.int8)
    program = finish(b, b.call(ops.dequantize, q, b.const("s", scales(4, 1)), None, SPEC))

    assert_expected_inline(
        golden(program, FoldStored()),
        """\
const %s: float32[4, 1]
const %_to_copy_default_stored: int8[4, 8]
%0 = qfuse.dequantize(%_to_copy_default_stored, %s, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[4, 8]
return (%0)
fired: fold-stored 1""",
    )


def test_refuses_constants() -> None:
    b = GraphBuilder()
    q, scale = b.const("q", codes(4, 8)), b.const("s", scales(4, 1))
    program = finish(b, b.call(ops.dequantize, q, scale, None, SPEC))

    assert refusal(program, FoldStored()) == (MissCode.NOT_CONSTANT, "dequantize_default")


def test_refuses_what_is_computed_at_run_time() -> None:
    b = GraphBuilder()
    q = b.call(aten.t.default, b.arg("q", torch.int8, 8, 4))
    scale = b.call(aten.unsqueeze.default, b.arg("s", torch.float32, 4), 1)
    program = finish(b, b.call(ops.dequantize, q, scale, None, SPEC))

    assert refusal(program, FoldStored()) == (MissCode.NOT_CONSTANT, "dequantize_default")


def test_refuses_random_numbers() -> None:
    b = GraphBuilder()
    q = b.call(aten.randint_like.default, b.const("q", codes(4, 8)), 5)
    program = finish(b, b.call(ops.dequantize, q, b.const("s", scales(4, 1)), None, SPEC))

    assert refusal(program, FoldStored()) == (MissCode.NOT_CONSTANT, "dequantize_default")


def test_refuses_a_constant_that_the_program_writes() -> None:
    b = GraphBuilder()
    q = b.const("q", codes(8, 4))
    q.meta["qfuse_mutable"] = True
    scale = b.const("s", scales(4, 1))
    program = finish(b, b.call(ops.dequantize, b.call(aten.t.default, q), scale, None, SPEC))

    assert refusal(program, FoldStored()) == (MissCode.NOT_CONSTANT, "dequantize_default")


@pytest.mark.numeric
def test_values_are_the_same_bits() -> None:
    b = GraphBuilder()
    q = b.call(aten.permute.default, b.const("q", codes(8, 5)), (1, 0))
    rows = b.call(aten.slice.Tensor, b.const("r", codes(9, 8)), 0, 2, 7)
    half = b.call(aten._to_copy.default, b.const("s", scales(5)), dtype=torch.bfloat16)
    scale = b.call(aten.view.default, b.call(aten.mul.Tensor, half, 0.3), (5, 1))

    mixed = b.call(aten.bitwise_xor.Scalar, rows, 85)
    outs = [b.call(ops.dequantize, n, scale, None, SPEC) for n in (q, rows, mixed)]
    result = assert_same_values(finish(b, *outs), [], FoldStored(), exact=True)

    assert result.fired == {"fold-stored": 3}


def test_golden_a_weight_that_the_graph_quantizes_is_quantized_once() -> None:
    b = GraphBuilder()
    weight, scale = b.const("w", torch.randn(4, 8)), b.const("s", scales(4, 1))
    q = b.call(ops.quantize, weight, scale, None, SPEC)
    program = finish(b, b.call(ops.dequantize, q, scale, None, SPEC))

    assert_expected_inline(
        golden(program, FoldStored()),
        """\
const %s: float32[4, 1]
const %quantize_default_stored: int8[4, 8]
%0 = qfuse.dequantize(%quantize_default_stored, %s, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[4, 8]
return (%0)
fired: fold-stored 1""",
    )


@pytest.mark.numeric
def test_parameters_that_are_chosen_from_a_weight_are_computed_once() -> None:
    b = GraphBuilder()
    weight = b.const("w", torch.randn(4, 8))
    largest = b.call(aten.amax.default, b.call(aten.abs.default, weight), [1], True)
    scale = b.call(aten.div.Tensor, largest, 127)
    q = b.call(ops.quantize, weight, scale, None, SPEC)
    program = finish(b, b.call(ops.dequantize, q, scale, None, SPEC))

    result = assert_same_values(program, [], FoldStored(), exact=True)
    assert result.fired == {"fold-stored": 1}
