"""Depthwise convolutions: bit for bit against exact arithmetic."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.cases.convolution_kernel import Convolution, depthwise, window
from tests.support.cases.linear_kernel import STORED
from tests.support.guard_pages import assert_same_with_guards

from qfuse.kernels import (
    KernelLibrary,
    convolution_depthwise_w8a8,
    convolution_depthwise_w8a8_quantized,
    instruction_set,
)

pytestmark = pytest.mark.numeric

# Around vectors and blocks of every path.
CHANNELS = (1, 3, 8, 15, 16, 17, 32, 33, 63, 64, 65, 96, 130)
WINDOWS = {
    "1x1": window(1, 1),
    "2x2": window(2, 2, stride=2),
    "3x3": window(3, 3),
    "3x3 padded": window(3, 3, padding=1),
    "3x3 padded stride 2": window(3, 3, padding=1, stride=2),
    "3x3 padded after": window(3, 3, padding=(0, 0, 1, 1), stride=2),
    "padded unevenly": window(2, 3, padding=(3, 0, 0, 2)),
    "5x5 padded": window(5, 5, padding=2),
    "7x7 padded": window(7, 7, padding=3),
    "5x5 padded stride 2": window(5, 5, padding=2, stride=2),
    "dilated": window(3, 3, padding=2, dilation=2),
    "wide": window(1, 9, padding=(0, 4)),
    "tall": window(3, 1, padding=(1, 0), stride=(1, 3)),
    "uneven": window(2, 4, padding=(1, 2), stride=(2, 1), dilation=(1, 3)),
    "padding beyond the input": window(3, 3, padding=13, stride=3),
}


def check(case: Convolution) -> None:
    y, expected = case.run(), case.expected()
    assert torch.equal(y, expected), (case.window, case.x.shape, y.shape)
    assert y.stride() == expected.stride()


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("dtype", STORED)
def test_every_window(isa: str, name: str, dtype: torch.dtype) -> None:
    del isa
    for channels in CHANNELS:
        check(depthwise((2, channels, 10, 9), WINDOWS[name], dtype=dtype))


@pytest.mark.parametrize("name", ["3x3 padded", "3x3 padded stride 2", "5x5 padded", "dilated"])
def test_every_size(isa: str, name: str) -> None:
    """Lines around strips, kernels larger than the image."""
    del isa
    for size in ((5, 5), (5, 31), (6, 32), (7, 33), (33, 5), (5, 67)):
        check(depthwise((2, 20, *size), WINDOWS[name]))


@pytest.mark.parametrize("multiple", [2, 3, 64, 65])
def test_several_output_channels_for_each(isa: str, multiple: int) -> None:
    del isa
    for channels, (name, w) in itertools.product((1, 5, 24), WINDOWS.items()):
        kind = {"multiple": multiple, "weight_zero_point": name == "3x3 padded"}
        if channels * multiple < 400:
            check(depthwise((2, channels, 10, 9), w, **kind))


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("name", ["2x2", "3x3 padded", "5x5 padded", "dilated"])
def test_every_granularity(isa: str, dtype: torch.dtype, name: str) -> None:
    del isa
    flags = ("zero_point", "weight_zero_point", "per_channel_scale", "bias")
    for values in itertools.product((False, True), repeat=len(flags)):
        kind = dict(zip(flags, values, strict=True))

        check(depthwise((2, 70, 6, 5), WINDOWS[name], dtype=dtype, **kind))


def test_the_largest_sums_are_exact(isa: str) -> None:
    del isa
    for zero, w_zero in ((0, None), (255, None), (0, torch.tensor([-128]))):
        case = depthwise((1, 3, 40, 40), window(40, 40), dtype=torch.uint8, bias=False)
        case.x.fill_(255 - zero)
        case.weight.fill_(-128 if w_zero is None else 127)
        check(replace(case, x_zero_point=torch.tensor([zero]), w_zero_point=w_zero))


@pytest.mark.parametrize("last", [False, True])
def test_memory_formats(isa: str, *, last: bool) -> None:
    del isa
    for name, channels in itertools.product(("3x3 padded", "3x3"), (1, 6, 64)):
        case = depthwise((3, channels, 6, 5), WINDOWS[name], last=last)
        wide = depthwise((3, channels + 7, 9, 8), window(1, 1), last=last).x
        views = (
            case.x,
            wide[:, 3 : 3 + channels, :6, :5],
            wide[:, :channels, 1:7, 2:7],
            wide[::2, :channels, ::2, ::2],
            wide[:, :channels].transpose(2, 3),
            case.x[:1].expand(3, -1, -1, -1),
            case.x[:, :, :1, :1].expand(-1, -1, 6, 5),
        )
        for x in views:
            check(replace(case, x=x))


@pytest.mark.parametrize(
    ("shape", "w"),
    [
        ((2, 20, 33), window(3, padding=1)),
        ((2, 20, 33), window(31, padding=15)),
        ((20, 33), window(4, stride=2)),
        ((20, 9, 8), window(3, 3, padding=1)),
        ((2, 20, 5, 6, 4), window(3, 3, 3, padding=1)),
        ((2, 20, 5, 6, 4), window(3, 1, 1, padding=(1, 0, 0))),
        ((2, 20, 5, 6, 4), window(1, 2, 3, stride=2, dilation=(1, 2, 1))),
        ((0, 20, 9, 8), window(3, 3)),
    ],
    ids=str,
)
def test_every_rank(isa: str, shape: tuple[int, ...], w: Any) -> None:
    del isa
    for dtype in STORED:
        check(depthwise(shape, w, dtype=dtype))


@pytest.mark.parametrize("name", ["2x2", "3x3 padded stride 2", "3x3 padded"])
def test_epilogues_and_quantized_results(isa: str, name: str) -> None:
    del isa
    for channels in (3, 70, 96):
        case = depthwise((2, channels, 10, 9), WINDOWS[name])
        shape = case.run().shape
        extras = [torch.randn(shape), torch.randn(2, channels, 1, 1), torch.randn(channels, 1, 1)]
        text = "act(hardtanh,0.0,6.0)|add(0,1.0)|mul(1)|add(2,0.5)"
        case = case.with_options(extras=extras, epilogue=text)
        check(case)
        y = case.run_quantized(
            out_scale=torch.tensor([0.03]), out_zero_point=torch.tensor([-7]), quant_min=-128,
            quant_max=127, out_dtype=torch.int8,
        )  # fmt: skip

        factor = torch.tensor([0.03]).reciprocal()
        expected = ((case.expected() * factor).round() - 7).clamp(-128, 127).to(torch.int8)
        assert torch.equal(y, expected)
        assert y.stride() == expected.stride()


def test_paths_and_threads_agree_bit_for_bit(library: KernelLibrary) -> None:
    before = torch.get_num_threads()
    for name in ("3x3 padded", "5x5 padded stride 2", "2x2"):
        case = depthwise((2, 130, 19, 37), WINDOWS[name], weight_zero_point=True)
        case = case.with_options(epilogue="act(gelu)")
        results = []
        for path in library.instruction_sets:
            with instruction_set(path):
                for threads in (1, 2, 5):
                    torch.set_num_threads(threads)
                    results.append(case.run())
        torch.set_num_threads(before)

        assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("name", ["1x1", "2x2", "3x3", "3x3 padded", "dilated", "5x5 padded"])
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("multiple", [1, 3])
def test_bounds(isa: str, name: str, dtype: torch.dtype, multiple: int) -> None:
    del isa
    for channels in (1, 16, 17, 32, 64, 70, 96):
        kind: dict[str, Any] = {"dtype": dtype, "multiple": multiple, "weight_zero_point": True}
        case = depthwise((2, channels, 6, 7), WINDOWS[name], **kind)
        extras = [torch.randn(case.run().shape)]
        case = case.with_options(extras=extras, epilogue="add(0,1.0)")
        wide = torch.nn.functional.pad(case.x.permute(0, 2, 3, 1), (2, 3))
        output = {
            "out_scale": torch.tensor([0.05]), "out_zero_point": torch.tensor([3]),
            "quant_min": -128, "quant_max": 127, "out_dtype": torch.int8,
        }  # fmt: skip
        for x in (case.x, wide[..., 2:-3].permute(0, 3, 1, 2)):
            args, options = replace(case, x=x).arguments()
            assert_same_with_guards(convolution_depthwise_w8a8, args, options)
            assert_same_with_guards(
                convolution_depthwise_w8a8_quantized, args, {**options, **output}
            )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(1, 4, 5, 5)}, "x must be int8 or uint8"),
        ({"x": torch.zeros(1, 4, 2, 5, dtype=torch.int8)}, "the kernel reaches over 3 pixels"),
        ({"x": torch.zeros(1, 3, 5, 5, dtype=torch.int8)}, "cannot be split into 3 groups"),
        ({"w_sums": torch.zeros(1, 4, dtype=torch.int32)}, "w_sums must be"),
        ({"w_packed": torch.zeros(1, 2, 64, 4, dtype=torch.int8)}, "w_packed must be"),
        ({"kernel": [3]}, "stride has 2 numbers, expected 1"),
        ({"x_scale": torch.ones(4)}, "x_scale has 4 elements, expected 1"),
        ({"out_dtype": torch.bfloat16}, "the epilogue gives Float"),
    ],
)
def test_refuses(library: KernelLibrary, change: dict[str, Any], message: str) -> None:
    del library
    case = depthwise((1, 4, 5, 5), window(3, 3))
    args, options = case.arguments()
    names = ("x", "x_scale", "x_zero_point", "w_packed", "w_sums", "w_scale")
    arguments = {**dict(zip(names, args, strict=True)), **options}

    with pytest.raises(RuntimeError, match=message):
        convolution_depthwise_w8a8(**{**arguments, **change})
