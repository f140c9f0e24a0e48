"""Epilogue ops on images, quantized in the same pass: torch's own ops are the reference, to the bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.cases.convolution_kernel import output_of
from tests.support.cases.linear_kernel import STORED, codes
from tests.support.graphs.image_activation import (
    CHANNELS,
    LAYOUTS,
    NORM,
    SIZES,
    Case,
    images,
    last,
    norm,
    normed,
)

from qfuse.kernels import image_activation_quantized

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("library")]


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("each", [False, True])
def test_a_norm(isa: str, channels: tuple[int, ...], dtype: torch.dtype, each: bool) -> None:
    """Of every dtype and granularity, width, range and size."""
    del isa
    total, least = sum(channels), torch.iinfo(dtype).min
    count = total if each else 1
    ranges = ((0, 255, 0), (0, 255, 131), (0, 255, 255), (3, 200, 17), (7, 7, 0), (0, 127, 300))
    zeros = (None, torch.randint(least, least + 256, (count,)), torch.tensor([0]))
    for size, zero, target in itertools.product(SIZES[:3] + SIZES[4:], zeros, STORED):
        parts = images(size, channels, dtype)
        extras = norm(parts[0].dim(), total)
        case = Case(parts, torch.rand(count) * 0.05 + 0.001, zero, NORM, extras, normed)
        for low, high, z in ranges:
            replace(case, output=output_of(target, low, high, z)).check()
    large = images(SIZES[3], channels, dtype)
    Case(large, torch.rand(count) * 0.05, zeros[1], NORM, norm(4, total), normed).check()


ACTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "act(relu)": torch.relu,
    "act(hardtanh,-0.2,1.3)": lambda y: y.clamp(-0.2, 1.3),
    "act(hardtanh,0.0,6.0)": lambda y: y.clamp(0, 6),
    "act(squared_relu)": lambda y: torch.relu(y).square(),
    "act(relu)|act(hardtanh,0.5,0.25)": lambda y: torch.full_like(y, 0.25),
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", STORED)
def test_a_norm_and_an_activation(isa: str, act: str, dtype: torch.dtype) -> None:
    del isa
    for channels, (low, high, z) in itertools.product(
        ((127,), (64, 33)), ((0, 255, 0), (0, 255, 131), (20, 200, 60), (0, 255, 300))
    ):
        case = Case(
            images((2, 5, 3), channels, dtype),
            torch.tensor([0.03]),
            torch.tensor([7]),
            f"{NORM}|{act}",
            norm(4, sum(channels)),
            lambda y, f, s: ACTS[act](normed(y, f, s)),
            output_of(dtype, low, high, z),
        )
        case.check()


def gates(channels: int) -> dict[str, torch.Tensor]:
    """Factors in every shape that broadcasts."""
    shapes = {
        "image and channel": (2, channels, 1, 1),
        "channel": (1, channels, 1, 1),
        "channel without a batch": (channels, 1, 1),
        "image": (2, 1, 1, 1),
        "pixel": (2, 1, 5, 3),
        "column": (3,),
        "one": (1,),
        "all": (2, channels, 5, 3),
    }
    return {name: torch.rand(shape) * 2 - 0.5 for name, shape in shapes.items()}


@pytest.mark.parametrize("name", gates(1))
@pytest.mark.parametrize("dtype", [*STORED, torch.float32])
def test_a_gate(isa: str, name: str, dtype: torch.dtype) -> None:
    """An image times what broadcasts to it, as in squeeze-excite."""
    del isa
    stored = not dtype.is_floating_point
    scale, zero = (torch.tensor([0.02]), torch.tensor([3])) if stored else (None, None)
    for channels, kind, layout in itertools.product(((64,), (127,), (16, 9)), REAL, LAYOUTS):
        gate = gates(sum(channels))[name].to(kind)
        case = Case(
            images((2, 5, 3), channels, dtype, layout),
            scale,
            zero,
            "mul(0)",
            [gate],
            lambda y, g: y * g.float(),
            output_of(torch.int8, zero=100),
        )
        case.check()


REAL = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_quantized_gate_and_addend(isa: str, dtype: torch.dtype) -> None:
    del isa
    stored = not dtype.is_floating_point
    scale = torch.tensor([0.02]) if stored else None
    for channels, kind, (factor, z) in itertools.product(
        (64, 35), STORED, ((0.0371, 5), (0.002, 0))
    ):
        q, other = codes((2, channels, 1, 1), kind), last(codes((2, channels, 5, 3), kind))
        gate, addend = ((x.float() - z) * torch.tensor(factor) for x in (q, other))
        params = f"{factor},{z}"
        for text, stored_extras, floats, steps in (
            (f"mul(0,{params})", [q], [gate], torch.mul),
            (f"mul(0,{params})|add(1,0.5,{params})", [q, other], [gate, addend], half_added),
            (f"add(0,-1.0,{params})|act(relu)", [q], [gate], lambda y, g: (y - g).relu()),
        ):
            parts = images((2, 5, 3), (channels,), dtype)
            case = Case(parts, scale, None, text, floats, steps)
            args, options = case.arguments()
            y = image_activation_quantized(*args, **{**options, "extras": stored_extras})
            assert torch.equal(y, case.expected()), (text, channels)


def half_added(y: torch.Tensor, gate: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
    return y * gate + addend * 0.5


@pytest.mark.parametrize("options", [{"reciprocal": False}, {"zero_point_first": True}])
@pytest.mark.parametrize("dtype", [*STORED, torch.float32])
def test_other_roundings(isa: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    del isa
    scale = None if dtype.is_floating_point else torch.tensor([0.02], dtype=torch.float64)
    for channels in ((64,), (33,)):
        output = {**output_of(torch.uint8, zero=9), **options}
        Case(
            images((2, 5, 3), channels, dtype),
            scale,
            None,
            NORM,
            norm(4, *channels),
            normed,
            output,
        ).check()
        Case(images((2, 5, 3), channels, dtype), scale, None, output=output).check()


# What leads to infinities, NaN, or values that 32 bits do not hold.
ODD = (math.inf, -math.inf, math.nan, 3e38, -3e38, 1e30, 1e-40, -0.0)


@pytest.mark.parametrize("dtype", [*STORED, torch.float32])
@pytest.mark.parametrize("act", ["", "|act(relu)", "|act(hardtanh,-1.0,1.0)"])
def test_numbers_that_are_not_finite(isa: str, dtype: torch.dtype, act: str) -> None:
    del isa
    stored = not dtype.is_floating_point
    steps = {"": lambda y: y, "|act(relu)": torch.relu}.get(act, lambda y: y.clamp(-1, 1))
    for channels, at in itertools.product((64, 32, 35), range(4)):
        for number in ODD:
            parts = images((1, 5, 3), (channels,), dtype)
            scale = torch.full((channels,), 0.02)
            extras = norm(4, channels)
            if at == 0 and stored:
                scale[5] = number
            elif at == 0:
                parts[0][0, 5, 1, 1] = number
            elif at == 3:
                scale = scale * 1e20
                extras[0][7] = number
            else:
                extras[at - 1][5] = number
            Case(
                parts,
                scale if stored else None,
                None,
                NORM + act,
                extras,
                lambda y, f, s, after=steps: after(normed(y, f, s)),
                output_of(torch.uint8, zero=130),
            ).check()


@pytest.mark.parametrize("dtype", STORED)
def test_ties_are_even(isa: str, dtype: torch.dtype) -> None:
    del isa
    for channels in (64, 35):
        x = last(torch.arange(256).sub(128 if dtype is torch.int8 else 0).to(dtype)
                 .reshape(1, 1, 16, 16).repeat(1, channels, 1, 1))  # fmt: skip
        Case([x], torch.tensor([0.5]), None, output=output_of(torch.uint8, scale=1.0)).check()


def test_small_and_large_scales(isa: str) -> None:
    """Sums of 16 bits must not wrap, and factors of any size stay exact."""
    del isa
    for scale, out, zero in itertools.product(
        (1e-8, 1e-2, 1e4, 1e30), (1e-30, 1e-6, 1e3), (0, 128, 9000)
    ):
        Case(
            images((1, 3, 3), (64,), torch.uint8),
            torch.tensor([scale]),
            torch.tensor([100]),
            NORM,
            norm(4, 64),
            normed,
            output_of(torch.int8, zero=zero, scale=out),
        ).check()
