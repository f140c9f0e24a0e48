from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.aten_spellings import (
    assert_same_values,
    aten,
    calls,
    finish,
    golden,
    refusal,
)

from qfuse.ir.events import MissCode
from qfuse.normalize.aten.activations.two_clamps import MergeClamps
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Miss
from qfuse.testing.build import GraphBuilder
from qfuse.testing.terms import Term, linear_result

Form = Callable[[Term], Term]
CLAMP = aten.clamp.default
LOW, HIGH = aten.clamp_min.default, aten.clamp_max.default
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1.0, 6.0]


def test_golden_relu_with_an_upper_bound() -> None:
    b = GraphBuilder()
    y = linear_result(b).call(aten.relu.default)

    assert_expected_inline(
        golden(finish(b, y.call(HIGH, 6).node, y.node), MergeClamps()),
        """\
const %w_s: float32[16, 1]
const %w: int8[16, 8]
%0 = qfuse.dequantize(%w, %w_s, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[16, 8]
%x: float32[s0, 8]
%1 = aten.linear(%x, %0): float32[s0, 16]
%2 = aten.relu(%1): float32[s0, 16]
%3 = aten.clamp(%1, 0.0, 6): float32[s0, 16]
return (%3, %2)
fired: merge-clamps 1""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "form",
    [
        lambda x: x.call(aten.relu.default).call(HIGH, 6),
        lambda x: x.call(HIGH, 1).call(LOW, -1.5),
        lambda x: x.call(LOW, -1.5).call(HIGH, 1),
        lambda x: x.call(HIGH, 0.0).call(LOW, -0.0),
        lambda x: x.call(CLAMP, None, 6).call(CLAMP, 0),
        lambda x: x.call(CLAMP, 0).call(CLAMP, None, 6.0),
        lambda x: x.call(HIGH, 6).call(aten.relu.default),
    ],
)
def test_values_are_equal(form: Form, dtype: torch.dtype) -> None:
    b = GraphBuilder()
    program = finish(b, form(linear_result(b, dtype)).node)
    x = torch.randn(33, 8) * 8
    x[: len(SPECIAL), 0] = torch.tensor(SPECIAL)
    result = assert_same_values(program, [x.to(dtype)], MergeClamps(), exact=True)

    assert result.fired == {"merge-clamps": 1}
    assert calls(program)[2:] == ["aten.clamp"]


@pytest.mark.parametrize("bounds", [(1.0, -1.0), (math.nan, 1.0)])
def test_refuses_bounds_that_cross(bounds: tuple[float, float]) -> None:
    b = GraphBuilder()
    low, high = bounds
    y = linear_result(b).call(HIGH, high).call(LOW, low)

    assert refusal(finish(b, y.node), MergeClamps()) == (MissCode.ARGUMENT, y.node.name)


def test_refuses_float_models() -> None:
    b = GraphBuilder()
    x = Term(b, b.arg("x", torch.float32, 4))
    y = x.call(aten.relu.default).call(HIGH, 6)
    miss = MergeClamps().match(y.node)

    assert not apply_rules(finish(b, y.node), [MergeClamps()]).modified
    assert isinstance(miss, Miss)
    assert (miss.code, miss.progress) == (MissCode.NOT_QUANTIZED, 0)
