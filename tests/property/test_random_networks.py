"""Random networks of every family keep their values, strides and inputs through the whole pipeline."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from tests.support.captured_case import CapturedCase, assert_kept
from tests.support.strategies.sequences.cases import sequence_cases

from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.testing.build import GraphBuilder

aten = torch.ops.aten

pytestmark = [pytest.mark.property, pytest.mark.numeric]

DEFAULT = settings()
# With the convolutions of test_random_convolutions.py at least 500 networks, whatever the profile.
MORE = settings(max_examples=max(150, DEFAULT.max_examples))
REST = settings(max_examples=max(50, DEFAULT.max_examples))


@pytest.mark.own_kernels
@MORE
@given(case=sequence_cases())
def test_values_stay_within_rounding(case: CapturedCase) -> None:
    assert_kept(case, own=True)


@pytest.mark.thorough
@REST
@given(case=sequence_cases())
def test_without_own_kernels_values_stay_within_rounding(case: CapturedCase) -> None:
    assert_kept(case, own=False)


@pytest.mark.parametrize(
    ("factor", "clamped", "defined"),
    [(1.0, False, True), (60000.0, True, True), (60000.0, False, False)],
)
def test_values_that_torch_does_not_define_are_told(
    factor: float, clamped: bool, defined: bool
) -> None:
    b = GraphBuilder()
    x = b.call(aten.mul.Tensor, b.arg("x", torch.float16, 4, 64), factor)
    x = b.call(aten.clamp.default, x, -128, 127) if clamped else x
    q = b.call(aten._to_copy.default, x, dtype=torch.int8)
    case = CapturedCase(b.done(q, stage=CapturedGraph), ({}, {}), exact=False, seed=0)
    assert (not case.undefined()) is defined
    assert defined or "aten._to_copy makes integers" in case.undefined()
