"""Random graphs of convolutions keep their values, strides and inputs through the whole pipeline."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from tests.support.captured_case import CapturedCase, assert_kept, assert_same_but_zeros, called
from tests.support.strategies.convolutions.cases import conv_cases
from tests.support.strategies.convolutions.in_place import dynamic_shapes, writing_modules
from tests.support.strategies.convolutions.qparams import pt2e
from torch.fx import GraphModule

import qfuse
from qfuse.capture import capture
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.model_check import ModelCheck
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder

aten = torch.ops.aten

pytestmark = [pytest.mark.property, pytest.mark.numeric]


DEFAULT = settings()
# Together at least 300 networks, whatever the profile.
MORE = settings(max_examples=max(120, DEFAULT.max_examples))
REST = settings(max_examples=max(60, DEFAULT.max_examples))


@pytest.mark.own_kernels
@MORE
@given(case=conv_cases(exact=True))
def test_sums_that_are_exact_keep_every_bit(case: CapturedCase) -> None:
    assert_kept(case, own=True)


@pytest.mark.thorough
@REST
@given(case=conv_cases(exact=True))
def test_without_own_kernels_every_bit_is_kept(case: CapturedCase) -> None:
    assert_kept(case, own=False)


@pytest.mark.own_kernels
@MORE
@given(case=conv_cases(exact=False))
def test_values_stay_within_rounding(case: CapturedCase) -> None:
    assert_kept(case, own=True)


FEWER = settings(max_examples=max(10, DEFAULT.max_examples // 4))


@pytest.mark.export
@FEWER
@given(drawn=writing_modules(exact=True))
def test_modules_that_write_to_their_values_keep_every_bit(
    drawn: tuple[CapturedCase, GraphModule],
) -> None:
    """Values are those of eager torch; its strides, which a capture may not keep, are not compared."""
    case, module = drawn
    inputs, shapes = case.inputs(), dynamic_shapes(case)
    fast = qfuse.compile(
        module,
        tuple(inputs),
        dynamic_shapes=shapes,
        target=Target.for_testing(),
        check="off",
        options={"backend": "eager", "own_kernels": False},
    )
    # Which values read a rounded one depends on the order of the writes: none is compared by bits.
    source = capture(module, tuple(inputs), dynamic_shapes=shapes) if case.rounded else None
    for which in (0, 1):
        inputs = case.inputs(which)
        if source is not None:
            verdict = ModelCheck.measure(source, inputs).judge(called(fast, case.program, inputs))
            assert verdict.wrong is None, f"{verdict.wrong}\n{fast.plan}"
            continue
        with torch.no_grad():
            old = module(*inputs)
        for index, (a, b) in enumerate(zip(called(fast, case.program, inputs), old, strict=True)):
            assert_same_but_zeros(a, b, f"output {index}", fast.plan)


@pytest.mark.parametrize("sizes", [(12, 12), (5, 5, 6)], ids=str)
def test_channels_last_pools_of_8_bits(sizes: tuple[int, ...]) -> None:
    rank = len(sizes)
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 1, 2, *sizes, order=(0, *range(2, rank + 2), 1))
    params = (0.05, 3, -128, 127, torch.int8)
    for op in (None, {2: aten.max_pool2d.default, 3: aten.max_pool3d.default}[rank]):
        x = x if op is None else b.call(op, x, [2] * rank)
        q = b.call(pt2e.quantize_per_tensor.default, x, *params)
        x = b.call(pt2e.dequantize_per_tensor.default, q, *params)
    case = CapturedCase(b.done(x, stage=CapturedGraph), ({}, {}), exact=True, seed=0)
    assert_kept(case, own=False)


def test_what_a_transposed_convolution_of_16_bits_gives_is_not_compared_by_bits() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float16, 2, 16, 8, 8)
    w = b.const("w", (torch.randint(-127, 128, (16, 4, 3, 3))).half())
    plain = b.call(aten.conv2d.default, x, b.call(aten.transpose.int, w, 0, 1))
    turned = b.call(aten.conv_transpose2d.input, x, w)
    after = b.call(aten.relu.default, turned)
    case = CapturedCase(b.done(plain, after, stage=CapturedGraph), ({}, {}), exact=True, seed=0)
    assert case.rounded == {turned, after}
    assert_kept(case, own=False)
