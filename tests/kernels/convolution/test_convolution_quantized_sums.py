"""Sums that become quantized values at once: every width, range and addend, and what overflows."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.cases.convolution_kernel import (
    Convolution,
    convolution,
    depthwise,
    output_of,
    quantized,
    window,
)
from tests.support.cases.linear_kernel import STORED, codes

pytestmark = pytest.mark.numeric

# Blocks of 64, 32 and 16 columns, and of fewer; all of them in 127.
FEATURES = (9, 16, 24, 32, 48, 64, 96, 112, 127, 192)
SHAPE = (2, 5, 4, 3)


def check(case: Convolution, output: dict[str, Any]) -> None:
    y, expected = case.run_quantized(**output), quantized(case.expected(), output)
    assert torch.equal(y, expected), (case.options, output)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("dtype", STORED)
def test_every_width_and_range(isa: str, features: int, dtype: torch.dtype) -> None:
    del isa
    cases = [
        convolution(SHAPE, features, window(3, 3, padding=1), bias=features % 2 == 0),
        depthwise((2, features, 4, 5), window(3, 3, padding=1)),
    ]
    ranges = ((0, 255, 0), (0, 255, 131), (0, 255, 255), (3, 200, 17), (7, 7, 0), (0, 127, 300))
    texts = (
        "",
        "act(relu)",
        "act(hardtanh,-0.2,1.3)",
        "act(hardswish)",
        "act(hardswish)|act(relu)",
    )
    for case, text in itertools.product(cases, texts):
        for low, high, zero in ranges:
            check(case.with_options(epilogue=text), output_of(dtype, low, high, zero))


@pytest.mark.parametrize("features", [16, 24, 33, 64, 96])
@pytest.mark.parametrize("pixels", range(1, 14))
def test_every_number_of_pixels(isa: str, pixels: int, features: int) -> None:
    """Tiles of six, three and one rows; depthwise pixels by two and one."""
    del isa
    cases = [
        convolution((1, 8, 1, pixels), features, window(1, 1)),
        convolution((1, 5, 2, pixels), features, window(1, 3, padding=1)),
        depthwise((1, features, 3, pixels), window(3, 3, padding=1)),
        depthwise((1, features, 2, 2 * pixels), window(2, 2, stride=2)),
    ]
    output = output_of(torch.uint8, zero=31)
    for case, text in itertools.product(cases, ("", "act(hardswish)")):
        check(case.with_options(epilogue=text), output)
    q = codes((1, features, 1, pixels), torch.int8)
    extra = (q.float() - 5) * torch.tensor(0.0371)
    sums = cases[0].with_options(extras=[extra], epilogue="add(0,0.5)")
    added = sums.with_options(extras=[q], epilogue="add(0,0.5,0.0371,5)")
    assert torch.equal(added.run_quantized(**output), quantized(sums.expected(), output))


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("dtype", STORED)
def test_a_quantized_addend(isa: str, features: int, dtype: torch.dtype) -> None:
    del isa
    scale, zero = 0.0371, 5
    for stored, alpha, last in itertools.product(STORED, (1.0, -0.5), (False, True)):
        case = convolution(SHAPE, features, window(1, 1), last=last)
        wide = codes((2, features + 3, 4, 3), stored)
        if last:
            wide = wide.contiguous(memory_format=torch.channels_last)
        for q in (wide[:, 3:], codes((features, 1, 1), stored), codes((1,), stored)):
            extra = (q.float() - zero) * torch.tensor(scale)
            sums = case.with_options(extras=[extra], epilogue=f"add(0,{alpha})|act(relu)")
            output = output_of(dtype, zero=99)
            text = f"add(0,{alpha},{scale},{zero})|act(relu)"

            y = sums.with_options(extras=[q], epilogue=text).run_quantized(**output)

            assert torch.equal(y, quantized(sums.expected(), output))


LARGE = {
    "saturates": (0.05, 0.05, 1.0, 0.001),
    "as large as 32 bits": (1.0, 1.0, 1e9, 1.0),
    "beyond 32 bits": (1e3, 1e3, 1e9, 1e-3),
    "infinite scale": (math.inf, 0.01, 0.0, 0.05),
    "infinite bias": (0.01, 0.01, math.inf, 0.05),
    "not a number": (0.01, math.nan, 0.0, 0.05),
    "tiny scales": (1e-30, 1e-30, 0.0, 1e-38),
    "tiny step": (0.01, 0.01, 0.1, 1e-38),
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("dtype", STORED)
def test_values_that_do_not_fit(isa: str, name: str, dtype: torch.dtype) -> None:
    """One channel of many: the others keep their values."""
    del isa
    x_scale, w_scale, bias, step = LARGE[name]
    case = convolution(SHAPE, 127, window(1, 1))
    weights, biases = case.w_scale.clone(), torch.zeros(127)
    for at in (0, 33, 70, 100, 126):
        weights[at], biases[at] = w_scale, bias if at % 2 else -bias
    case = replace(case, x_scale=torch.tensor([x_scale]), w_scale=weights, bias=biases)

    for text in ("", "act(hardswish)"):
        check(case.with_options(epilogue=text), output_of(dtype, zero=100, scale=step))


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("step", [0.0007, 0.02, 0.3])
def test_a_hard_swish_has_the_bits_of_the_division(
    isa: str, dtype: torch.dtype, step: float
) -> None:
    """Ties of the rounding included: scales are powers of two or sixths of them."""
    del isa
    for x_scale, w_scale in ((2.0**-6, 2.0**-5), (2.0**-6, 2.0**-4 / 6), (0.013, 0.0171)):
        case = convolution((1, 16, 13, 11), 96, window(1, 1))
        case = replace(
            case,
            x_scale=torch.tensor([x_scale]),
            w_scale=torch.full((96,), w_scale),
            bias=torch.linspace(-4, 4, 96),
        ).with_options(epilogue="act(hardswish)")
        check(case, output_of(dtype, zero=77, scale=step))
        check(case, output_of(dtype, zero=77, scale=2.0**-7))


@pytest.mark.parametrize("zero", [-9000, -8192, 8192, 8193, 40000])
def test_zero_points_far_from_the_range(isa: str, zero: int) -> None:
    """Beyond 16 bits after a sum they are added in 32."""
    del isa
    for features in (64, 32):
        case = convolution(SHAPE, features, window(3, 3, padding=1))
        for scale in (0.037, 1e-4, 3e-6):
            check(case, output_of(torch.uint8, zero=zero, scale=scale))


@pytest.mark.parametrize("features", [64, 96, 24])
def test_sums_that_overflow_between_the_scales(isa: str, features: int) -> None:
    """The product of both scales is small, but a sum times the first one is not."""
    del isa
    case = convolution(SHAPE, features, window(1, 1), bias=False)
    case = replace(case, x_scale=torch.tensor([1e36]), w_scale=torch.full((features,), 1e-38))
    assert case.real().isinf().any()

    check(case, output_of(torch.uint8, zero=100, scale=0.5))


@pytest.mark.parametrize("scale", [math.inf, math.nan, 1e36, 0.0])
def test_addends_that_do_not_fit(isa: str, scale: float) -> None:
    del isa
    case = convolution(SHAPE, 96, window(1, 1))
    q = codes((2, 96, 4, 3), torch.uint8).contiguous(memory_format=torch.channels_last)
    extra = (q.float() - 7) * torch.tensor(scale)
    sums = case.with_options(extras=[extra], epilogue="add(0,1.0)")
    output = output_of(torch.uint8, zero=100)

    y = sums.with_options(extras=[q], epilogue=f"add(0,1.0,{scale},7)").run_quantized(**output)

    assert torch.equal(y, quantized(sums.expected(), output))
