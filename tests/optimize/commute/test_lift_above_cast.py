from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.propagate import Graph, applied, only_miss, priced, spec_of, steps

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.spec import Arithmetic
from qfuse.optimize.propagate.lift_quantize import LiftQuantize
from qfuse.optimize.schedule import move

aten = torch.ops.aten
cast = aten._to_copy.default
COMPUTE_DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WIDENING = [
    (narrow, wide)
    for narrow in COMPUTE_DTYPES
    for wide in COMPUTE_DTYPES
    if narrow != wide and torch.promote_types(narrow, wide) == wide
]


def quantized(g: Graph, x: Any, *block: int | None, **changes: Any) -> Any:
    """A static quantize of a value of its own type."""
    spec = spec_of(*block, float_dtype=x.meta["val"].dtype, **changes)
    return g.quantize(x, spec, g.params(x, spec))


@pytest.mark.numeric
def test_golden_the_narrow_numbers_are_quantized() -> None:
    g = Graph(4, 6, dtype=torch.bfloat16)
    program = g.done(quantized(g, g.call(cast, g.x, dtype=torch.float32), 1, None))

    assert applied(program, LiftQuantize).fired == {"lift-quantize": 1}
    assert steps(program) == ["quantize[4, 6]", "dequantize[4, 6]", "neg[4, 6]"]
    (q,) = [n for n in program.graph.nodes if n.target is ops.quantize]
    assert q.args[0].name == "x"
    assert "bfloat16" in q.args[3]
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: bfloat16[4, 6]
const %scale1: float32[4, 1]
const %zero2: int32[4, 1]
%0 = qfuse.quantize(%x, %scale1, %zero2, 'int8[-128,127] 1x* bfloat16 float32:reciprocal:round-zp int'): int8[4, 6]
%1 = qfuse.dequantize(%0, %scale1, %zero2, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[4, 6]
%2 = aten.neg(%1): float32[4, 6]
return (%2)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize(("narrow", "wide"), WIDENING, ids=str)
@pytest.mark.parametrize("compute", COMPUTE_DTYPES, ids=str)
@pytest.mark.parametrize("storage", [torch.int8, torch.uint8], ids=str)
def test_every_type_and_arithmetic(
    narrow: torch.dtype, wide: torch.dtype, compute: torch.dtype, storage: torch.dtype
) -> None:
    g = Graph(4, 6, dtype=narrow)
    wider = g.call(cast, g.x, dtype=wide)
    arithmetic = Arithmetic(compute, reciprocal=False, zero_point_first=True)
    program = g.done(quantized(g, wider, None, 3, dtype=storage, arithmetic=arithmetic), wider)

    assert applied(program, LiftQuantize).fired == {"lift-quantize": 1}


@pytest.mark.numeric
def test_a_cast_between_movements_is_crossed() -> None:
    g = Graph(2, 6, 8, dtype=torch.bfloat16)
    wide = g.call(cast, g.call(aten.permute.default, g.x, [1, 0, 2]), dtype=torch.float32)
    program = g.done(quantized(g, g.call(aten.reshape.default, wide, [6, 16]), None, None))

    fired = move(program, priced())
    assert fired["lift-quantize"] == 3
    assert steps(program)[0] == "quantize[2, 6, 8]"


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.bfloat16),
    ],
    ids=str,
)
def test_refuses_casts_that_round(narrow: torch.dtype, wide: torch.dtype) -> None:
    g = Graph(4, 6, dtype=narrow)
    x = g.call(cast, g.x, dtype=wide)
    program = g.done(quantized(g, x, None, None))

    miss = only_miss(program, LiftQuantize)
    assert (miss.code, miss.at) == (MissCode.DTYPE, x)


def test_refuses_casts_of_stored_numbers() -> None:
    g = Graph(1)
    x = g.call(cast, g.stored(4, 6), dtype=torch.float32)

    assert only_miss(g.done(quantized(g, x, None, None)), LiftQuantize).code is MissCode.DTYPE


def test_refuses_a_cast_that_the_scale_is_chosen_from() -> None:
    g = Graph(4, 6, dtype=torch.bfloat16)
    x = g.call(cast, g.x, dtype=torch.float32)
    spec = spec_of(1, None)
    program = g.done(g.quantize(x, spec, g.choose(x, (1, None))))

    miss = only_miss(program, LiftQuantize)
    assert (miss.code, miss.at) == (MissCode.SHARED, x)


def test_refuses_to_change_the_strides_that_the_caller_sees() -> None:
    g = Graph(4, 6, dtype=torch.bfloat16)
    turned = g.call(aten.permute.default, g.x, [1, 0])
    x = g.call(cast, turned, dtype=torch.float32, memory_format=torch.contiguous_format)
    program = g.b.done(quantized(g, x, None, None))

    assert not applied(program, LiftQuantize).modified
