from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.propagate import Graph, applied, only_miss, priced, spec_of, steps
from tests.support.values import bits_same

from qfuse import lower
from qfuse.cost import CostModel, CostProfile
from qfuse.ir.events import Left, MissCode
from qfuse.ir.graph.stage_graph import OptimizedGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.quant.spec import QuantSpec
from qfuse.optimize.propagate.fuse_requantize import FuseRequantize
from qfuse.targets import Target
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten

SPEC = spec_of(None, None)


def graph(old: QuantSpec = SPEC, new: QuantSpec = SPEC) -> tuple[Graph, list[torch.fx.Node]]:
    """A dequantize and a quantize of it, with different parameters."""
    g = Graph(1)
    q = g.b.arg("q", old.dtype, 4, 6)
    x = g.dequantize(q, old, g.params(q, old))
    return g, [x, g.quantize(x, new, g.params(q, new))]


@pytest.mark.numeric
def test_golden_one_op_between_two_edges() -> None:
    g, (_, q) = graph()
    program = g.done(g.call(aten._to_copy.default, q, dtype=torch.int32))

    assert applied(program, FuseRequantize).fired == {"fuse-requantize": 1}
    assert steps(program) == ["requantize[4, 6]", "_to_copy[4, 6]", "_to_copy[4, 6]"]
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[1]
%q: int8[4, 6]
const %scale1: float32[1, 1]
const %zero2: int32[1, 1]
const %scale3: float32[1, 1]
const %zero4: int32[1, 1]
%0 = qfuse.requantize(%q, %scale1, %zero2, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int', %scale3, %zero4, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): int8[4, 6]
%1 = aten._to_copy(%0, dtype=int32): int32[4, 6]
%2 = aten._to_copy(%1, dtype=float32): float32[4, 6]
return (%2)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("float_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", [(None, None), (1, None), (2, 3)], ids=str)
def test_the_real_edge_rounds_as_before(
    float_dtype: torch.dtype, block: tuple[int | None, ...]
) -> None:
    old = spec_of(*block, dtype=torch.uint8, float_dtype=float_dtype, low=3, high=200)
    g, (_, q) = graph(old, spec_of(None, 1, float_dtype=float_dtype))
    program = g.done(g.call(aten._to_copy.default, q, dtype=torch.int32))

    assert applied(program, FuseRequantize).fired == {"fuse-requantize": 1}


@pytest.mark.numeric
def test_lower_expands_it_and_says_why_it_is_there() -> None:
    g, (_, q) = graph()
    program = g.done(g.call(aten._to_copy.default, q, dtype=torch.int32))
    inputs = random_inputs(program)
    want = run(program, inputs)
    applied(program, FuseRequantize)
    optimized = OptimizedGraph(program.module, program.signature, program.log)
    low = lower.lower(optimized, Target.for_testing(), CostModel(CostProfile.pinned()), [])

    assert bits_same(run(low, inputs), want)
    (left,) = low.log.of(Left)
    assert left.reason == "it changes the parameters between two quantized ops"


@pytest.mark.numeric
def test_several_quantizes_share_what_they_read() -> None:
    g = Graph(1)
    q = g.stored(4, 6)
    x = g.dequantize(q, SPEC, g.params(q, SPEC))
    made = [g.quantize(x, SPEC, g.params(q, SPEC)) for _ in range(3)]
    program = g.done(*(g.call(aten._to_copy.default, m, dtype=torch.int32) for m in made))

    assert applied(program, FuseRequantize).fired == {"fuse-requantize": 3}
    assert "dequantize[4, 6]" not in steps(program)


def test_refuses_real_numbers_that_something_else_reads() -> None:
    g, (x, q) = graph()
    program = g.done(q, x)

    miss = only_miss(program, FuseRequantize, context=priced())
    assert (miss.code, miss.at) == (MissCode.SHARED, x)
