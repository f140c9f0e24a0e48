"""Epilogue ops on images: memory, threads, empty images, and arguments that are refused."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.cases.convolution_kernel import output_of
from tests.support.cases.fake_kernels import OPCHECKS
from tests.support.graphs.image_activation import (
    LAYOUTS,
    NORM,
    SIZES,
    Case,
    images,
    norm,
    normed,
)
from tests.support.guard_pages import assert_same_with_guards

from qfuse.ir.errors import InputError
from qfuse.kernels import cat_channels, image_activation_quantized

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("library")]


@pytest.mark.parametrize("channels", [(64,), (31, 64, 65, 0, 7), (256, 24), (5,)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_reads_and_writes_nothing_else(isa: str, channels: tuple[int, ...], layout: str) -> None:
    del isa
    total = sum(channels)
    for size, dtype in itertools.product(SIZES[:3] + SIZES[4:], (torch.uint8, torch.float32)):
        stored = not dtype.is_floating_point
        parts = images(size, channels, dtype, layout)
        scale, zero = torch.rand(total) * 0.05, torch.randint(0, 255, (total,))
        for text, extras in (
            (NORM, norm(parts[0].dim(), total)),
            ("mul(0)|act(silu)", [torch.rand(size[0], total, *(1,) * (len(size) - 1))]),
            ("add(0,0.5)", [torch.rand(size[0], total, *size[1:])]),
        ):
            case = Case(parts, scale, zero) if stored else Case(parts, None, None)
            args, options = replace(case, text=text, extras=extras).arguments()
            assert_same_with_guards(image_activation_quantized, args, options)


def test_threads_and_instruction_sets_do_not_matter(isa: str) -> None:
    del isa
    torch.manual_seed(0)
    parts = images((2, 57, 31), (64, 32, 5), torch.int8)
    case = Case(parts, torch.tensor([0.03]), None, NORM, norm(4, 101), normed)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            case.check()
    finally:
        torch.set_num_threads(threads)


def test_without_steps_it_is_a_join_of_other_scales(isa: str) -> None:
    del isa
    parts = images((2, 5, 3), (64, 32, 7), torch.uint8)
    y = Case(parts, torch.tensor([0.5]), None, output=output_of(torch.uint8, scale=0.5)).check()

    assert torch.equal(y, cat_channels(parts[0], parts[1:]))


@pytest.mark.parametrize("size", [(0, 4, 4), (2, 0, 4)])
def test_no_pixel(isa: str, size: tuple[int, ...]) -> None:
    del isa
    parts = [torch.empty(size[0], c, *size[1:], dtype=torch.uint8) for c in (3, 4)]
    Case(parts, torch.tensor([0.1]), None, NORM, norm(4, 7), normed).check()


def test_no_channel(isa: str) -> None:
    del isa
    parts = [torch.empty(2, 0, 4, 4, dtype=torch.uint8)] * 2
    Case(parts, torch.tensor([0.1]), None).check()


STORED_IMAGE = torch.zeros(2, 3, 4, 4, dtype=torch.int8)
SCALE = torch.tensor([0.1])
WRONG: dict[str, tuple[list[torch.Tensor], dict[str, Any]]] = {
    "4 or 5 axes": ([STORED_IMAGE[0]], {"x_scale": SCALE}),
    "int8, uint8 or float32": ([STORED_IMAGE.bfloat16()], {}),
    "channels only": ([STORED_IMAGE, STORED_IMAGE[:, :, 1:]], {"x_scale": SCALE}),
    "need a scale": ([STORED_IMAGE], {}),
    "neither scale nor zero point": ([STORED_IMAGE.float()], {"x_scale": SCALE}),
    "x_scale has 2 elements, expected 1 or 3": ([STORED_IMAGE], {"x_scale": torch.ones(2)}),
    "not float32": ([STORED_IMAGE], {"x_scale": SCALE, "epilogue": "cast(bfloat16)"}),
    "does not support GLU": ([STORED_IMAGE], {"x_scale": SCALE, "epilogue": "glu(silu,up-first)"}),
    "not there": ([STORED_IMAGE], {"x_scale": SCALE, "epilogue": "mul(0)"}),
    "at least one axis": (
        [STORED_IMAGE],
        {"x_scale": SCALE, "epilogue": "mul(0)", "extras": [torch.tensor(1.0)]},
    ),
    "range of the codes": ([STORED_IMAGE], {"x_scale": SCALE, "quant_max": 300}),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_it_refuses(message: str) -> None:
    parts, options = WRONG[message]
    with pytest.raises(RuntimeError, match=message):
        image_activation_quantized(parts[0], parts[1:], **{**output_of(torch.uint8), **options})


def test_what_the_fake_refuses() -> None:
    meta = [x.to("meta") for x in (STORED_IMAGE, STORED_IMAGE[:, :, 1:])]
    options = {**output_of(torch.uint8), "x_scale": SCALE}
    with pytest.raises(InputError, match="channels only"):
        image_activation_quantized(meta[0], meta[1:], **options)
    with pytest.raises(InputError, match="int8 or uint8"):
        image_activation_quantized(meta[0], None, **{**options, "out_dtype": torch.int32})
    with pytest.raises(InputError, match="4 or 5 axes"):
        image_activation_quantized(meta[0][0], None, **options)


@pytest.mark.parametrize("size", SIZES)
def test_the_fake_is_like_the_result(size: tuple[int, ...]) -> None:
    parts = images(size, (5, 16, 33), torch.uint8, "rows")
    args, options = Case(parts, SCALE, None, NORM, norm(parts[0].dim(), 54), normed).arguments()
    y = image_activation_quantized(*args, **options)

    fake = image_activation_quantized(
        args[0].to("meta"), [x.to("meta") for x in args[1]], **options
    )

    assert (fake.shape, fake.stride(), fake.dtype) == (y.shape, y.stride(), y.dtype)
    bound = image_activation_quantized._bind(args, options)
    op = torch.ops.qfuse.image_activation_quantized.default
    torch.library.opcheck(op, tuple(bound), test_utils=OPCHECKS)
