from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.propagate import Graph, applied, only_miss, spec_of, steps

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.spec import Arithmetic, QuantSpec, ZeroPointDomain
from qfuse.optimize.commute.clamp import Clamp
from qfuse.optimize.propagate.lift_quantize import LiftQuantize

aten = torch.ops.aten


def constants(g: Graph, scale: Any, zero: Any, rank: int = 2) -> tuple[Any, Any]:
    """A scale and a zero point, of one entry unless they are tensors."""
    shape = [1] * rank
    made = scale if isinstance(scale, torch.Tensor) else torch.full(shape, scale)
    stored = zero if isinstance(zero, torch.Tensor) else torch.full(shape, zero, dtype=torch.int32)
    return g.constant(made, "scale"), g.constant(stored, "zero")


def clamped(
    g: Graph, op: Any, args: tuple[Any, ...], scale: Any, zero: Any, spec: QuantSpec
) -> Any:
    """A quantize of a clamp of the input."""
    return g.quantize(g.call(op, g.x, *args), spec, constants(g, scale, zero))


def spec_after(program: Any) -> QuantSpec:
    """The spec of the only quantize."""
    (q,) = [n for n in program.graph.nodes if n.target is ops.quantize]
    return QuantSpec.parse(q.args[3])


@pytest.mark.numeric
def test_golden_a_rectifier_is_a_range() -> None:
    g = Graph(4, 6)
    program = g.done(clamped(g, aten.relu.default, (), 0.1, -7, spec_of(None, None)))

    assert applied(program, LiftQuantize).fired == {"lift-quantize": 1}
    assert steps(program) == ["quantize[4, 6]", "dequantize[4, 6]", "neg[4, 6]"]
    spec = spec_after(program)
    assert (spec.quant_min, spec.quant_max) == (-7, 127)
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[4, 6]
const %scale1: float32[1, 1]
const %zero2: int32[1, 1]
%0 = qfuse.quantize(%x, %scale1, %zero2, 'int8[-7,127] *x* float32 float32:reciprocal:round-zp int'): int8[4, 6]
%1 = qfuse.dequantize(%0, %scale1, %zero2, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int'): float32[4, 6]
%2 = aten.neg(%1): float32[4, 6]
return (%2)""",
    )


CLAMPS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.relu.default, ()),
    (aten.relu6.default, ()),
    (aten.hardtanh.default, ()),
    (aten.hardtanh.default, (-0.25, 1.1)),
    (aten.clamp.default, (-0.3,)),
    (aten.clamp.default, (None, 0.7)),
    (aten.clamp.default, (2, -1)),
    (aten.clamp.default, (-6e4, 6e4)),
    (aten.clamp_min.default, (0.05,)),
    (aten.clamp_max.default, (-0.05,)),
]


@pytest.mark.numeric
@pytest.mark.parametrize(("op", "args"), CLAMPS, ids=str)
@pytest.mark.parametrize("zero", [-128, -3, 300])
@pytest.mark.parametrize("float_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "arithmetic",
    [
        Arithmetic(),
        Arithmetic(torch.float64, reciprocal=False),
        Arithmetic(zero_point_first=True),
        Arithmetic(torch.bfloat16),
    ],
    ids=str,
)
def test_cutting_off_before_is_cutting_off_after(
    op: Any, args: tuple[Any, ...], zero: int, float_dtype: torch.dtype, arithmetic: Arithmetic
) -> None:
    g = Graph(16, 33, dtype=float_dtype)
    spec = spec_of(None, None, float_dtype=float_dtype, arithmetic=arithmetic, low=-120, high=119)
    program = g.done(clamped(g, op, args, 0.0123, zero, spec))

    assert applied(program, LiftQuantize).fired == {"lift-quantize": 1}


@pytest.mark.numeric
def test_blocks_with_one_zero_point() -> None:
    g = Graph(3, 6)
    scale = torch.tensor([[0.1], [0.02], [3.0]])
    zero = torch.full((3, 1), 5)
    program = g.done(clamped(g, aten.relu.default, (), scale, zero, spec_of(1, None)))

    assert applied(program, LiftQuantize).fired == {"lift-quantize": 1}


@pytest.mark.numeric
def test_all_quantizes_of_one_clamp() -> None:
    g = Graph(4, 6)
    x = g.call(aten.relu.default, g.x)
    spec = spec_of(None, None)
    made = [g.quantize(x, spec, constants(g, scale, zero)) for scale, zero in ((0.1, 3), (0.2, 0))]
    program = g.done(*made)

    assert applied(program, LiftQuantize).fired == {"lift-quantize": 2}
    assert "relu" not in " ".join(steps(program))


def test_refuses_a_clamp_that_something_else_reads() -> None:
    g = Graph(4, 6)
    x = g.call(aten.relu.default, g.x)
    spec = spec_of(None, None)
    program = g.done(g.quantize(x, spec, constants(g, 0.1, 3)), x)

    miss = only_miss(program, LiftQuantize)
    assert (miss.code, miss.at) == (MissCode.SHARED, x)


def test_refuses_parameters_of_run_time() -> None:
    g = Graph(4, 6)
    x = g.call(aten.relu.default, g.x)
    spec = spec_of(1, None)
    scale, zero = g.choose(g.x, (1, None))
    program = g.done(g.quantize(x, spec, (scale, zero)))

    miss = only_miss(program, LiftQuantize)
    assert (miss.code, miss.at) == (MissCode.NOT_CONSTANT, scale)


@pytest.mark.parametrize("case", ["zero points", "scales"])
def test_refuses_blocks_that_store_a_bound_differently(case: str) -> None:
    g = Graph(2, 6)
    scale, zero = torch.tensor([[0.1], [0.1]]), torch.tensor([[3], [3]])
    op: Any = aten.relu.default
    args: tuple[Any, ...] = ()
    if case == "scales":
        scale[1], op, args = 0.2, aten.clamp_min.default, (-1.5,)
    else:
        zero[1] = 4
    program = g.done(clamped(g, op, args, scale, zero, spec_of(1, None)))

    assert only_miss(program, LiftQuantize).code is MissCode.GRANULARITY


@pytest.mark.parametrize("scale", [-0.1, 0.0, float("inf"), float("nan"), 1e-39])
def test_refuses_scales_that_keep_no_order(scale: float) -> None:
    g = Graph(4, 6)
    program = g.done(clamped(g, aten.relu.default, (), scale, 3, spec_of(None, None)))

    assert only_miss(program, LiftQuantize).code is MissCode.RANGE


def test_refuses_a_zero_point_that_is_no_number() -> None:
    g = Graph(4, 6)
    zero = torch.full((1, 1), float("nan"))
    program = g.done(clamped(g, aten.relu.default, (), 0.1, zero, spec_of(None, None)))

    assert only_miss(program, LiftQuantize).code is MissCode.RANGE


def test_refuses_real_offsets() -> None:
    g = Graph(4, 6)
    spec = spec_of(None, None, domain=ZeroPointDomain.FLOAT_OFFSET)
    zero = torch.full((1, 1), 0.5)

    program = g.done(clamped(g, aten.relu.default, (), 0.1, zero, spec))
    assert only_miss(program, LiftQuantize).code is MissCode.DTYPE


def test_refuses_float_storage() -> None:
    g = Graph(4, 6)
    spec = QuantSpec(torch.float8_e4m3fn, -448, 448, (None, None), domain=ZeroPointDomain.NONE)
    x = g.call(aten.relu.default, g.x)
    program = g.done(g.quantize(x, spec, (g.constant(torch.full((1, 1), 0.1), "scale"), None)))

    assert only_miss(program, LiftQuantize).code is MissCode.DTYPE


def test_refuses_bounds_that_are_tensors() -> None:
    g = Graph(4, 6)
    x = g.call(aten.clamp.Tensor, g.x, g.constant(torch.zeros(()), "low"))
    spec = spec_of(None, None)
    program = g.done(g.quantize(x, spec, constants(g, 0.1, 3)))

    assert not applied(program, LiftQuantize).modified


@pytest.mark.parametrize("bound", [float("nan"), 1e39, -1e39])
def test_refuses_a_bound_that_is_no_number_of_the_type(bound: float) -> None:
    g = Graph(4, 6)

    assert Clamp.of(g.call(aten.clamp.default, g.x, bound)) is None
    assert Clamp.of(g.call(aten.clamp.default, g.x, float("inf"))) is not None
