"""The float64 form of an epilogue."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from tests.support.cases.mx_linear import mx

from qfuse.ir.ops import library as ops
from qfuse.ir.ops.activation import Activation
from qfuse.ir.ops.epilogue import (
    Act,
    Add,
    Cast,
    Epilogue,
    EpilogueOp,
    Glu,
    GluOrder,
    Mul,
    Prelu,
    Round,
)
from qfuse.ir.ops.output import Output
from qfuse.ir.quant.spec import Arithmetic, QuantSpec
from qfuse.rewrite.values import Values, wide_value
from qfuse.testing.build import GraphBuilder

NARROW = [torch.float32, torch.bfloat16, torch.float16]


def wide(epilogue: Epilogue, x: torch.Tensor, *extras: torch.Tensor) -> torch.Tensor:
    """The steps in float64."""
    b = GraphBuilder()
    node = b.arg("x", x.dtype, *x.shape)
    consts = tuple(b.const(f"c{index}", extra) for index, extra in enumerate(extras))
    call = Activation(node, node, None, epilogue, consts, Output()).call_args()
    out = b.item(b.call(ops.activation, *call), 0)
    program = b.done(out)
    found = wide_value(out, Values(program.module, [x]), frozenset())
    assert isinstance(found, torch.Tensor), "an op has no float64 form"
    return found


def steps(dtype: torch.dtype) -> list[EpilogueOp]:
    """A step of every kind, with every type that it has narrow."""
    spec = QuantSpec(torch.int8, -128, 127, (None, None), dtype, Arithmetic(dtype))
    trip = Round(1, 2, spec)
    act = Act("leaky_relu", (0.3,))
    glu = Glu(act, GluOrder.GATE_FIRST)
    return [act, Add(0), Mul(0), Mul(0, trip), Prelu(0), Cast(dtype), glu, trip]


def test_there_is_a_step_of_every_kind() -> None:
    assert {type(step) for step in steps(torch.float32)} == set(get_args(EpilogueOp))


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("at", range(len(steps(torch.float32))))
def test_every_step_is_done_in_float64(dtype: torch.dtype, at: int) -> None:
    torch.manual_seed(at)
    step = steps(dtype)[at]
    x, other = torch.randn(4, 6, dtype=dtype), torch.randn(4, 6, dtype=dtype)
    scale, zero = torch.full((1, 1), 0.037, dtype=dtype), torch.full((1, 1), 3, dtype=torch.int32)

    found = wide(Epilogue((step,)), x, other, scale, zero)

    # Both steps that round are of the same numbers; the spec of the whole has no narrow type.
    spec = QuantSpec(torch.int8, -128, 127, (None, None), torch.float64, Arithmetic(torch.float64))
    meant: EpilogueOp = step
    if isinstance(step, Round):
        meant = Round(1, 2, spec)
    elif isinstance(step, Mul) and step.rounded is not None:
        meant = Mul(0, Round(1, 2, spec))
    elif isinstance(step, Cast):
        meant = Cast(torch.float64)
    expected = Epilogue((meant,)).apply(x.double(), [other.double(), scale.double(), zero])
    assert found.dtype is torch.float64
    assert torch.equal(found, expected)


@pytest.mark.numeric
def test_scales_in_formats_of_their_own_stay_in_float32() -> None:
    spec = mx(1, 32)
    x = torch.randn(2, 32)
    scale = torch.full((2, 1), 126, dtype=torch.uint8).view(torch.float8_e8m0fnu)

    found = wide(Epilogue((Round(0, None, spec), Cast(torch.bfloat16))), x, scale)

    assert found.dtype is torch.float64
    assert torch.equal(found, Round(0, None, spec).apply(x, [scale]).double())
