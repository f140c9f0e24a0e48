"""The integer convolution, its scales and bias: bit for bit against exact arithmetic."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.cases.convolution_kernel import Convolution, convolution, window
from tests.support.cases.linear_kernel import STORED

from qfuse.kernels import KernelLibrary, convolution_w8a8, instruction_set

pytestmark = pytest.mark.numeric

WINDOWS = {
    "1x1": window(1, 1),
    "3x3": window(3, 3),
    "3x3 padded": window(3, 3, padding=1),
    "3x3 padded stride 2": window(3, 3, padding=1, stride=2),
    "3x3 padded after": window(3, 3, padding=(0, 0, 1, 1), stride=2),
    "padded unevenly": window(2, 3, padding=(3, 0, 0, 2)),
    "1x1 stride 2": window(1, 1, stride=2),
    "1x1 padded": window(1, 1, padding=1),
    "7x7 padded stride 2": window(7, 7, padding=3, stride=2),
    "dilated": window(3, 3, padding=2, dilation=2),
    "dilated one way": window(3, 2, padding=(1, 2), dilation=(1, 3)),
    "wide": window(1, 5, padding=(0, 2)),
    "tall": window(4, 1, padding=(2, 0), stride=(1, 3)),
    "padding beyond the input": window(2, 2, padding=6, stride=3),
}


def same(y: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether bits and strides are the same."""
    return (
        torch.equal(y, expected) and y.stride() == expected.stride() and y.dtype == expected.dtype
    )


def check(case: Convolution) -> None:
    y, expected = case.run(), case.expected()
    assert same(y, expected), (case.window, case.x.shape, y.shape, expected.shape)


@pytest.mark.parametrize("name", WINDOWS)
def test_every_window(isa: str, name: str) -> None:
    del isa
    sizes = itertools.product((1, 3, 4, 16, 65), (1, 17, 64, 70))
    for index, (channels, features) in enumerate(sizes):
        dtype = STORED[index % 2]

        check(convolution((2, channels, 9, 8), features, WINDOWS[name], dtype=dtype))


@pytest.mark.parametrize("groups", [2, 3, 5])
@pytest.mark.parametrize("name", ["1x1", "3x3 padded stride 2", "dilated"])
def test_groups(isa: str, groups: int, name: str) -> None:
    del isa
    w = replace(WINDOWS[name], groups=groups)
    for channels, features in ((1, 1), (4, 3), (5, 65), (8, 64)):
        check(convolution((2, channels * groups, 7, 6), features * groups, w))


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (5, 1), (2, 2), (6, 16), (13, 29)])
@pytest.mark.parametrize("images", [1, 3])
def test_every_size(isa: str, size: tuple[int, int], images: int) -> None:
    """Rows around tiles and panels, images that share tiles."""
    del isa
    for name in ("1x1", "3x3 padded", "1x1 stride 2", "3x3 padded stride 2"):
        check(convolution((images, 12, *size), 66, WINDOWS[name]))


FLAGS = ("zero_point", "weight_zero_point", "per_channel_scale", "bias")


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("name", ["1x1", "3x3 padded"])
@pytest.mark.parametrize("groups", [1, 2])
def test_every_granularity(isa: str, dtype: torch.dtype, name: str, groups: int) -> None:
    del isa
    w = replace(WINDOWS[name], groups=groups)
    for flags in itertools.product((False, True), repeat=len(FLAGS)):
        kind = dict(zip(FLAGS, flags, strict=True))

        check(convolution((2, 8, 6, 5), 70, w, dtype=dtype, **kind))


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("end", ["min", "max"])
def test_padding_is_with_the_zero_point(isa: str, dtype: torch.dtype, end: str) -> None:
    del isa
    info = torch.iinfo(dtype)
    for zero in (info.min, -1 if info.min else 1, 0, info.max):
        case = convolution((1, 5, 3, 3), 4, WINDOWS["3x3 padded"], dtype=dtype)
        case.x.fill_(getattr(info, end))

        check(replace(case, x_zero_point=torch.tensor([zero])))


@pytest.mark.parametrize("last", [False, True])
def test_memory_formats(isa: str, *, last: bool) -> None:
    """The result has torch's strides; slices, crops and copies of the input are read right."""
    del isa
    for name, channels in itertools.product(("1x1", "3x3 padded"), (1, 4, 6)):
        case = convolution((3, channels, 6, 5), 10, WINDOWS[name], last=last)
        wide = convolution((3, channels + 7, 9, 8), 10, window(1, 1), last=last).x
        views = {
            "whole": case.x,
            "slice of channels": wide[:, 3 : 3 + channels, :6, :5],
            "crop": wide[:, :channels, 1:7, 2:7],
            "every second image": wide[::2, :channels],
            "every second pixel": wide[:, :channels, ::2, ::2],
            "transposed": wide[:, :channels].transpose(2, 3),
            "expanded": case.x[:1].expand(3, -1, -1, -1),
            "expanded pixels": case.x[:, :, :1, :1].expand(-1, -1, 6, 5),
            "flat": case.x[:, :, :1],
        }
        for view, x in views.items():
            one = replace(case, x=x)

            assert torch.equal(one.run(), one.expected()), (name, view)
            assert one.run().stride() == one.expected().stride(), (name, view)


def test_paths_and_threads_agree_bit_for_bit(library: KernelLibrary) -> None:
    options: dict[str, Any] = {"epilogue": "act(gelu)|act(silu)", "out_dtype": torch.float32}
    cases = [
        convolution((2, 20, 19, 17), 130, WINDOWS[name], weight_zero_point=True)
        .with_options(**options)
        for name in ("1x1", "3x3 padded", "7x7 padded stride 2")
    ]  # fmt: skip
    before = torch.get_num_threads()
    for case in cases:
        results = []
        for name in library.instruction_sets:
            with instruction_set(name):
                for threads in (1, 2, 5):
                    torch.set_num_threads(threads)
                    results.append(case.run())
        torch.set_num_threads(before)

        assert all(torch.equal(results[0], other) for other in results[1:])


def test_the_largest_sums_are_exact(isa: str) -> None:
    del isa
    case = convolution((1, 1 << 14, 2, 2), 3, window(2, 2), dtype=torch.uint8, bias=False)
    case.x.fill_(255)
    case.weight.fill_(-128)
    check(replace(case, x_zero_point=torch.tensor([0])))

    half = convolution((1, 1 << 13, 2, 2), 3, window(2, 2), dtype=torch.uint8, bias=False)
    half.x.fill_(255)
    half.weight.fill_(127)
    check(replace(half, x_zero_point=torch.tensor([0]), w_zero_point=torch.tensor([-128])))


def test_inputs_are_not_written_to(isa: str) -> None:
    del isa
    case = convolution((2, 6, 7, 7), 70, WINDOWS["3x3 padded"], weight_zero_point=True)
    args, options = case.with_options(
        extras=[torch.randn(2, 70, 7, 7)], epilogue="act(relu)|add(0,1.0)"
    ).arguments()
    tensors = [a for a in (*args, *options.values()) if isinstance(a, torch.Tensor)]
    before = [t.clone() for t in tensors]

    first, second = convolution_w8a8(*args, **options), convolution_w8a8(*args, **options)

    assert torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(1, 4, 5, 5)}, "x must be int8 or uint8"),
        ({"x": torch.zeros(1, 5, 5, 5, dtype=torch.int8)}, "w_packed must be"),
        ({"x": torch.zeros(5, 5, dtype=torch.int8)}, "x has 2 axes, expected 3 or 4"),
        ({"x": torch.zeros(1, 4, 2, 5, dtype=torch.int8)}, "the kernel reaches over 3 pixels"),
        ({"x_scale": torch.ones(2)}, "x_scale has 2 elements, expected 1"),
        ({"x_zero_point": torch.tensor([128])}, "outside of the range"),
        ({"x_zero_point": torch.tensor([0.0])}, "whole numbers"),
        ({"w_scale": torch.ones(4)}, "w_scale has 4 elements"),
        ({"w_sums": torch.zeros(6)}, "w_sums must be"),
        ({"w_sums": torch.zeros(1, 6, dtype=torch.int32)}, "w_sums must be"),
        ({"bias": torch.ones(4)}, "bias has 4 elements"),
        ({"out_dtype": torch.bfloat16}, "the epilogue gives Float"),
        ({"kernel": [3]}, "stride has 2 numbers, expected 1"),
        ({"kernel": [3, 3, 3, 3]}, "expected 1 to 3"),
        ({"kernel": [0, 3]}, "kernel 0 is less than 1"),
        ({"stride": [1]}, "stride has 1 numbers, expected 2"),
        ({"stride": [0, 1]}, "stride 0 is less than 1"),
        ({"padding": [0, -1]}, "padding -1 is less than 0"),
        ({"padding": [0, 0, 0, -1]}, "padding -1 is less than 0"),
        ({"padding": [0, 0, 0]}, "padding has 3 numbers, expected 2"),
        ({"dilation": [0, 1]}, "dilation 0 is less than 1"),
        ({"output_padding": [0, 1]}, "output_padding is for transposed"),
        ({"groups": 0}, "groups 0 is less than 1"),
        ({"groups": 4}, "cannot be split into 4 groups"),
        ({"transposed": True}, "w_sums must be"),
        ({"epilogue": "glu(silu,gate-first)"}, "does not support GLU"),
        ({"epilogue": "add(0,1.0)", "extras": [torch.ones(())]}, "at least one axis"),
        ({"epilogue": "add(0,1.0)", "extras": [torch.ones(5, 1, 1)]}, "expand"),
    ],
)
def test_refuses(library: KernelLibrary, change: dict[str, Any], message: str) -> None:
    del library
    case = convolution((1, 4, 5, 5), 6, window(3, 3))
    args, options = case.arguments()
    names = ("x", "x_scale", "x_zero_point", "w_packed", "w_sums", "w_scale")
    arguments = {**dict(zip(names, args, strict=True)), **options}

    with pytest.raises(RuntimeError, match=message):
        convolution_w8a8(**{**arguments, **change})


def test_refuses_sums_that_could_overflow(library: KernelLibrary) -> None:
    del library
    case = convolution((1, (1 << 13) + 1, 2, 2), 1, window(2, 2), weight_zero_point=True)

    with pytest.raises(RuntimeError, match="int32 sums are exact up to 32768"):
        case.run()
