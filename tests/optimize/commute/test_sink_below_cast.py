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
from qfuse.optimize.propagate.sink_dequantize import SinkDequantize
from qfuse.optimize.schedule import move

aten = torch.ops.aten
cast = aten._to_copy.default
COMPUTE_DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def dequantized(
    g: Graph, float_dtype: torch.dtype, compute: torch.dtype, *block: int | None
) -> Any:
    """A dequantize of quantized values."""
    spec = spec_of(*block, float_dtype=float_dtype, arithmetic=Arithmetic(compute))
    q = g.stored(4, 6)
    return g.dequantize(q, spec, g.params(q, spec))


@pytest.mark.numeric
def test_golden_it_gives_the_type_of_the_cast() -> None:
    g = Graph(1)
    x = dequantized(g, torch.float32, torch.float32, 1, None)
    program = g.done(g.call(cast, x, dtype=torch.bfloat16))

    assert applied(program, SinkDequantize).fired == {"sink-dequantize": 1}
    assert steps(program) == ["dequantize[4, 6]", "neg[4, 6]"]
    (made,) = [n for n in program.graph.nodes if n.target is ops.dequantize]
    assert made.meta["val"].dtype is torch.bfloat16
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[1]
%q1: int8[4, 6]
const %scale2: float32[4, 1]
const %zero3: int32[4, 1]
%0 = qfuse.dequantize(%q1, %scale2, %zero3, 'int8[-128,127] 1x* bfloat16 float32:reciprocal:round-zp int'): bfloat16[4, 6]
%1 = aten.neg(%0): bfloat16[4, 6]
return (%1)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("float_dtype", COMPUTE_DTYPES, ids=str)
@pytest.mark.parametrize("compute", COMPUTE_DTYPES, ids=str)
@pytest.mark.parametrize("given", COMPUTE_DTYPES, ids=str)
def test_one_rounding_is_one_rounding(
    float_dtype: torch.dtype, compute: torch.dtype, given: torch.dtype
) -> None:
    g = Graph(1)
    x = dequantized(g, float_dtype, compute, None, 2)
    program = g.done(g.call(cast, x, dtype=given), x)

    legal = torch.promote_types(compute, float_dtype) == float_dtype
    assert applied(program, SinkDequantize).fired == ({"sink-dequantize": 1} if legal else {})


@pytest.mark.numeric
def test_a_cast_behind_a_movement_is_crossed() -> None:
    g = Graph(1)
    x = dequantized(g, torch.float32, torch.float32, None, None)
    turned = g.call(aten.permute.default, x, [1, 0])
    program = g.done(g.call(cast, turned, dtype=torch.bfloat16))

    assert move(program, priced())["sink-dequantize"] == 2
    assert steps(program) == ["permute[6, 4]", "dequantize[6, 4]", "neg[6, 4]"]


def test_refuses_to_make_two_roundings_one() -> None:
    g = Graph(1)
    x = dequantized(g, torch.bfloat16, torch.float32, None, None)
    program = g.done(g.call(cast, x, dtype=torch.float32))

    miss = only_miss(program, SinkDequantize)
    assert (miss.code, miss.at) == (MissCode.ARITHMETIC, x)


def test_refuses_a_cast_to_integers() -> None:
    g = Graph(1)
    x = dequantized(g, torch.float32, torch.float32, None, None)
    program = g.done(g.call(cast, x, dtype=torch.int32))

    assert only_miss(program, SinkDequantize).code is MissCode.DTYPE


def test_refuses_a_cast_that_does_more() -> None:
    g = Graph(1)
    x = dequantized(g, torch.float32, torch.float32, None, None)
    y = g.call(cast, x, dtype=torch.bfloat16, memory_format=torch.contiguous_format)

    assert not applied(g.done(y), SinkDequantize).modified
