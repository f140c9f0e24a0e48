from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.propagate import Graph, applied, only_miss, priced, spec_of, steps

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import OptimizedGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.linear import as_fused_linear
from qfuse.ir.quant.spec import QuantSpec, ZeroPointDomain
from qfuse.optimize.fuse.linear import FuseLinear
from qfuse.optimize.fuse.output_quantize import FuseOutputQuantize
from qfuse.optimize.propagate.fuse_range import FuseRange
from qfuse.optimize.propagate.fuse_requantize import FuseRequantize
from qfuse.optimize.schedule import move
from qfuse.testing.quant import QuantizedLinear, per_token

aten = torch.ops.aten
clamp = aten.clamp.default
SPEC = spec_of(None, None)


def ranges(program: Any, op: Any = ops.quantize, at: int = 3) -> list[tuple[int, int]]:
    """The ranges of the calls of an op."""
    specs = [QuantSpec.parse(n.args[at]) for n in program.graph.nodes if n.target is op]
    return [(spec.quant_min, spec.quant_max) for spec in specs]


def read(g: Graph, q: Any) -> Any:
    """A reader of quantized values."""
    return g.call(aten._to_copy.default, q, dtype=torch.int32)


@pytest.mark.numeric
def test_golden_the_range_is_what_both_have() -> None:
    g = Graph(4, 6)
    scale = g.constant(torch.tensor([[0.1]]), "scale")
    q = g.quantize(g.x, SPEC, (scale, None))
    program = g.done(read(g, g.call(clamp, q, 3, 100)))

    assert applied(program, FuseRange).fired == {"fuse-range": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[4, 6]
const %scale1: float32[1, 1]
%0 = qfuse.quantize(%x, %scale1, None, 'int8[3,100] *x* float32 float32:reciprocal:round-zp int'): int8[4, 6]
%1 = aten._to_copy(%0, dtype=int32): int32[4, 6]
%2 = aten._to_copy(%1, dtype=float32): float32[4, 6]
return (%2)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("bounds", "range_"),
    [
        ((3, None), (3, 90)),
        ((None, 5), (-100, 5)),
        ((-128, 127), (-100, 90)),
        ((95, 120), (95, 95)),
        ((-128, -110), (-110, -110)),
        ((7, 2), (2, 2)),
    ],
    ids=str,
)
def test_ranges_that_meet_and_that_do_not(bounds: tuple[Any, Any], range_: tuple[int, int]) -> None:
    g = Graph(4, 60)
    spec = spec_of(None, None, low=-100, high=90)
    q = g.quantize(g.x, spec, g.params(g.x, spec))
    program = g.done(read(g, g.call(clamp, q, *bounds)))

    assert applied(program, FuseRange).fired == {"fuse-range": 1}
    assert ranges(program) == [range_]


@pytest.mark.numeric
def test_a_requantize_takes_the_range() -> None:
    g = Graph(1)
    stored = g.stored(4, 60)
    x = g.dequantize(stored, SPEC, g.params(stored, SPEC))
    q = g.quantize(x, SPEC, g.params(stored, SPEC))
    program = g.done(read(g, g.call(clamp, q, -5, 60)))

    assert applied(program, FuseRequantize, FuseRange).fired == {
        "fuse-requantize": 1,
        "fuse-range": 1,
    }
    assert ranges(program, ops.requantize, 6) == [(-5, 60)]


@pytest.mark.numeric
def test_a_linear_that_stores_its_result_takes_the_range() -> None:
    g = Graph(4, 8)
    block = QuantizedLinear(g.b, 6, 8)
    q, scale, zero = block.stored(g.x, spec_of(None, None))
    x = g.dequantize(q, SPEC, (scale, zero))
    y = block.linear(x)
    out = g.quantize(y, SPEC, g.params(y, SPEC))
    program = g.b.done(read(g, g.call(clamp, out, 0, None)), stage=OptimizedGraph)
    fired = applied(program, FuseLinear, FuseOutputQuantize, FuseRange).fired

    assert fired["fuse-range"] == 1
    (linear,) = filter(None, map(as_fused_linear, program.graph.nodes))
    assert linear.out_params is not None
    assert linear.out_params.spec.quant_min == 0


@pytest.mark.numeric
@pytest.mark.parametrize(("first", "second"), [((-50, 60), (-20, 90)), ((0, 10), (20, 30))])
def test_two_quantizes_of_one_scale_are_one(
    first: tuple[int, int], second: tuple[int, int]
) -> None:
    g = Graph(4, 60)
    specs = [spec_of(None, None, low=low, high=high) for low, high in (first, second)]
    params = g.params(g.x, SPEC)
    x = g.x
    for spec in specs:
        x = g.dequantize(g.quantize(x, spec, params), spec, params)
    program = g.done(x)

    move(program, priced())
    assert steps(program) == ["quantize[4, 60]", "dequantize[4, 60]", "neg[4, 60]"]
    low = min(max(first[0], second[0]), second[1])
    high = min(max(first[1], second[0]), second[1])
    assert ranges(program) == [(low, high)]


@pytest.mark.numeric
def test_two_requantizes_of_other_scales_stay_two() -> None:
    g = Graph(1)
    x = stored = g.stored(4, 60)
    for _ in range(3):
        params = g.params(stored, SPEC)
        x = g.dequantize(x if x is stored else g.quantize(x, SPEC, params), SPEC, params)
    program = g.done(x)

    move(program, priced())
    assert [step.partition("[")[0] for step in steps(program)] == [
        *("requantize", "requantize", "dequantize", "neg"),
    ]


def test_refuses_what_others_read_too() -> None:
    g = Graph(4, 6)
    q = g.quantize(g.x, SPEC, g.params(g.x, SPEC))
    program = g.done(read(g, g.call(clamp, q, 3)), read(g, q))

    miss = only_miss(program, FuseRange)
    assert (miss.code, miss.at) == (MissCode.SHARED, q)


@pytest.mark.parametrize("bound", [0.5, True])
def test_refuses_bounds_that_are_no_integers(bound: float) -> None:
    g = Graph(4, 6)
    q = g.quantize(g.x, SPEC, g.params(g.x, SPEC))
    y = g.call(clamp, q, bound)

    assert only_miss(
        g.done(g.call(aten._to_copy.default, y, dtype=torch.float32)), FuseRange
    ).code is (MissCode.ARGUMENT)


def test_refuses_a_bound_that_the_type_does_not_have() -> None:
    g = Graph(4, 6)
    spec = spec_of(None, None, dtype=torch.uint8)
    # Torch takes -1 for 255 here.
    y = g.call(clamp, g.quantize(g.x, spec, g.params(g.x, spec)), -1, 100)

    miss = only_miss(g.done(g.call(aten._to_copy.default, y, dtype=torch.float32)), FuseRange)
    assert miss.code is MissCode.ARGUMENT


def test_refuses_a_clamp_of_anything_else() -> None:
    g = Graph(4, 6)
    block = QuantizedLinear(g.b, 6, 6)
    y = block.linear(block.quantized(g.x, per_token(2, block=(None, None))))
    program = g.b.done(g.call(clamp, y, 0.0), stage=OptimizedGraph)

    assert applied(program, FuseLinear, FuseRange).fired == {"fuse-linear": 1}


def test_refuses_a_float_offset() -> None:
    """It counts from the middle of the range, which would move."""
    g = Graph(4, 6)
    spec = replace(spec_of(None, None, low=0, high=15), domain=ZeroPointDomain.FLOAT_OFFSET)
    q = g.quantize(g.x, spec, (g.constant(torch.tensor([[0.1]]), "s"), None))

    miss = only_miss(g.done(read(g, g.call(clamp, q, 3, 15))), FuseRange)
    assert (miss.code, miss.at) == (MissCode.ZERO_POINT, q)
