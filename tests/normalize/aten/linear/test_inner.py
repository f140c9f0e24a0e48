from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    finish,
    golden,
    refusal,
    whole,
)

from qfuse.ir.events import MissCode
from qfuse.normalize.aten.linear.spellings import LINEAR_FROM
from qfuse.testing.build import GraphBuilder


def test_golden_inner_and_tensordot() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, "m", 8)
    w, v = b.const("w", torch.randn(4, 8)), b.const("v", torch.randn(8, 4))
    y = b.call(aten.inner.default, x, w)
    z = b.call(aten.tensordot.default, x, v, (2,), (0,))

    assert_expected_inline(
        golden(finish(b, y, z), LINEAR_FROM["inner"]()),
        """\
%x: float32[2, s0, 8]
const %w: float32[4, 8]
%0 = aten.linear(%x, %w): float32[2, s0, 4]
const %v_t: float32[4, 8]
%1 = aten.linear(%x, %v_t): float32[2, s0, 4]
return (%0, %1)
fired: linear-from-inner 2""",
    )


@pytest.mark.parametrize(("dims", "other"), [((0,), (1,)), ((1, 2), (0, 1)), ((-2,), (1,))])
def test_refuses_other_axes(dims: tuple[int, ...], other: tuple[int, ...]) -> None:
    b = GraphBuilder()
    x, w = b.arg("x", torch.float32, 8, 8, 8), b.const("w", torch.randn(8, 8))
    program = finish(b, b.call(aten.tensordot.default, x, w, dims, other))

    assert refusal(program, LINEAR_FROM["inner"]()) == (MissCode.AXIS, "tensordot_default")


@pytest.mark.parametrize(("k", "shape"), [(8, (16, 1)), (1, (16, 8))])
def test_refuses_an_axis_of_one_element_that_is_spread(k: int, shape: tuple[int, int]) -> None:
    b = GraphBuilder()
    x, w = b.arg("x", torch.float32, 2, k), b.const("w", torch.randn(shape))
    program = finish(b, b.call(aten.tensordot.default, x, w, (1,), (1,)))

    assert refusal(program, LINEAR_FROM["inner"]()) == (MissCode.SHAPE, "tensordot_default")


def test_refuses_two_activations() -> None:
    b = GraphBuilder()
    x, y = b.arg("x", torch.float32, 3, 8), b.arg("y", torch.float32, 4, 8)
    program = finish(b, b.call(aten.inner.default, x, y))

    assert refusal(program, LINEAR_FROM["inner"]()) == (MissCode.NOT_CONSTANT, "y")


@pytest.mark.numeric
@pytest.mark.parametrize("shape", [(33,), (3, 33), (2, 3, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_agree(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for exact in (True, False):
        make = whole if exact else torch.randn
        b = GraphBuilder()
        x, w = b.arg("x", dtype, *shape), b.const("w", make(7, 33).to(dtype))
        y = b.call(aten.inner.default, x, w)
        z = b.call(aten.tensordot.default, x, w, (-1,), (-1,))

        inputs = [make(*shape).to(dtype)]
        result = assert_same_values(finish(b, y, z), inputs, LINEAR_FROM["inner"](), exact=exact)

        assert result.fired == {"linear-from-inner": 2}
