from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.propagate import Graph, applied, only_miss, spec_of, steps

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.reference import dequantize, quantize
from qfuse.ir.quant.spec import Arithmetic, QuantSpec, ZeroPointDomain, dtype_range
from qfuse.optimize.propagate.cancel_quantize import CancelQuantize

aten = torch.ops.aten

SPEC = spec_of(None, None)


def pair(
    old: QuantSpec, new: QuantSpec, scale: torch.Tensor | None = None, zero: Any = None
) -> tuple[Graph, Any]:
    """A quantize of a dequantize of quantized values, with one scale and zero point."""
    g = Graph(1)
    q = g.b.arg("q", old.dtype, 4, 6)
    made, zero_point = g.params(q, old)
    if scale is not None:
        made = g.constant(scale, "scale")
    if zero is not None:
        zero_point = g.constant(zero, "zero")
    return g, g.quantize(g.dequantize(q, old, (made, zero_point)), new, (made, zero_point))


@pytest.mark.numeric
def test_golden_stored_numbers_come_back() -> None:
    g, q = pair(SPEC, SPEC)
    program = g.done(q)

    assert applied(program, CancelQuantize).fired == {"cancel-quantize": 1}
    assert steps(program) == ["dequantize[4, 6]", "neg[4, 6]"]
    (made,) = [n for n in program.graph.nodes if n.target is ops.dequantize]
    assert made.args[0].name == "q"
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[1]
%q: int8[4, 6]
const %scale1: float32[1, 1]
const %zero2: int32[1, 1]
%0 = qfuse.dequantize(%q, %scale1, %zero2, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): float32[4, 6]
%1 = aten.neg(%0): float32[4, 6]
return (%1)""",
    )


ARITHMETICS = [
    Arithmetic(compute, reciprocal, first)
    for compute in (torch.float32, torch.float64)
    for reciprocal in (True, False)
    for first in (True, False)
]


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("arithmetic", ARITHMETICS, ids=str)
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16], ids=str)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float64], ids=str)
def test_every_stored_number_comes_back(
    arithmetic: Arithmetic, dtype: torch.dtype, scale_dtype: torch.dtype
) -> None:
    low, high = dtype_range(dtype)
    q = torch.arange(low, high + 1, dtype=torch.int32).to(dtype)
    spec = replace(spec_of(None, dtype=dtype), arithmetic=arithmetic)
    exponents = torch.empty(40, dtype=torch.float64).uniform_(-37.9, 33)
    for scale in (10**exponents).to(scale_dtype):
        for zero in (0, low, high, 1 << 16, -(1 << 16)):
            given = scale.reshape(1), torch.tensor([zero], dtype=torch.int32)
            for new in (spec, replace(spec, arithmetic=Arithmetic())):
                back = quantize(dequantize(q, *given, spec), *given, new)
                assert torch.equal(back, q), f"scale {scale.item()!r}, zero point {zero}"


@pytest.mark.numeric
@pytest.mark.parametrize("block", [(1, None), (None, 2), (2, 3)], ids=str)
def test_blocks_and_ranges_behind_movements(block: tuple[int | None, ...]) -> None:
    g = Graph(6, 4)
    narrow = spec_of(None, None, low=-8, high=7)
    q = g.call(aten.permute.default, g.quantize(g.x, narrow, g.params(g.x, narrow)), [1, 0])
    spec = spec_of(*block, low=-8, high=7)
    params = g.params(q, spec)
    again = g.quantize(g.dequantize(q, spec, params), spec, params)
    program = g.done(g.call(aten._to_copy.default, again, dtype=torch.int32))

    assert applied(program, CancelQuantize).fired == {"cancel-quantize": 1}


@pytest.mark.numeric
def test_a_range_that_may_cut_off_stays_as_a_clamp() -> None:
    g, q = pair(SPEC, replace(SPEC, quant_min=-3, quant_max=50))
    program = g.done(q)

    assert applied(program, CancelQuantize).fired == {"cancel-quantize": 1}
    assert steps(program) == ["clamp[4, 6]", "dequantize[4, 6]", "neg[4, 6]"]
    (cut,) = [n for n in program.graph.nodes if n.target is aten.clamp.default]
    assert cut.args[1:] == (-3, 50)


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        (
            replace(SPEC, float_dtype=torch.bfloat16),
            replace(SPEC, float_dtype=torch.bfloat16),
            MissCode.DTYPE,
        ),
        (
            SPEC,
            replace(SPEC, arithmetic=Arithmetic(torch.float16)),
            MissCode.ARITHMETIC,
        ),
        (
            replace(SPEC, domain=ZeroPointDomain.FLOAT_OFFSET),
            replace(SPEC, domain=ZeroPointDomain.FLOAT_OFFSET),
            MissCode.ZERO_POINT,
        ),
        (
            spec_of(None, None, dtype=torch.int32),
            spec_of(None, None, dtype=torch.int32),
            MissCode.DTYPE,
        ),
        (SPEC, spec_of(None, None, dtype=torch.uint8), MissCode.DTYPE),
    ],
    ids=["bf16-edge", "fp16-arithmetic", "offset", "int32", "another-storage"],
)
def test_refuses_specs_that_do_not_give_all_back(
    old: QuantSpec, new: QuantSpec, code: MissCode
) -> None:
    g, q = pair(old, new)
    program = g.done(q)

    assert only_miss(program, CancelQuantize).code is code


@pytest.mark.parametrize(
    ("scale", "zero", "code"),
    [
        (1e-39, 0, MissCode.RANGE),
        (1e36, 0, MissCode.RANGE),
        (0.0, 0, MissCode.RANGE),
        (float("inf"), 0, MissCode.RANGE),
        (float("nan"), 0, MissCode.RANGE),
        (0.1, 1 << 20, MissCode.ZERO_POINT),
        (0.1, 0.5, MissCode.ZERO_POINT),
    ],
)
def test_refuses_numbers_that_round_too_far(scale: float, zero: float, code: MissCode) -> None:
    g, q = pair(SPEC, SPEC, torch.tensor([[scale]]), torch.tensor([[zero]]))

    assert only_miss(g.done(q), CancelQuantize).code is code


def test_refuses_other_parameters() -> None:
    g = Graph(1)
    q = g.stored(4, 6)
    x = g.dequantize(q, SPEC, g.params(q, SPEC))
    program = g.done(g.quantize(x, SPEC, g.params(q, SPEC)))

    assert only_miss(program, CancelQuantize).code is MissCode.GRANULARITY


def test_refuses_a_scale_of_run_time() -> None:
    g = Graph(4, 6)
    params = g.choose(g.x, (None, None))
    q = g.quantize(g.x, SPEC, params)
    program = g.done(g.quantize(g.dequantize(q, SPEC, params), SPEC, params))

    assert only_miss(program, CancelQuantize).code is MissCode.NOT_CONSTANT


@pytest.mark.numeric
def test_the_caller_gets_a_copy_of_an_input() -> None:
    g, q = pair(SPEC, SPEC)
    program = g.b.done(q)

    assert applied(program, CancelQuantize).fired == {"cancel-quantize": 1}
    assert [n.name for n in program.graph.find_nodes(op="call_function", target=aten.clone.default)]


def of_output() -> tuple[Graph, list[Any]]:
    """A model whose outputs are quantized, dequantized and quantized again."""
    g = Graph(1)
    y = g.b.arg("y", torch.float32, 4, 6)
    params = g.params(y, SPEC)
    q = g.quantize(y, SPEC, params)
    real = g.dequantize(q, SPEC, params)
    return g, [g.quantize(real, SPEC, params), g.quantize(real, SPEC, params)]


@pytest.mark.numeric
def test_an_output_is_the_quantized_tensor_and_a_second_one_a_copy() -> None:
    g, outs = of_output()
    program = g.b.done(*outs)

    assert applied(program, CancelQuantize).fired == {"cancel-quantize": 2}
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[1]
%y: float32[4, 6]
const %scale1: float32[1, 1]
const %zero2: int32[1, 1]
%0 = qfuse.quantize(%y, %scale1, %zero2, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): int8[4, 6]
%1 = aten.clone(%0): int8[4, 6]
return (%0, %1)""",
    )
