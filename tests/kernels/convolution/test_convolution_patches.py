"""Copies of patches: runs of every length, lines that are partly outside, memory that ends."""

from __future__ import annotations

import pytest
import torch
from tests.support.cases.convolution_kernel import convolution, window
from tests.support.cases.linear_kernel import STORED
from tests.support.guard_pages import assert_same_with_guards

from qfuse.kernels import convolution_w8a8

pytestmark = pytest.mark.numeric

# Around the sizes of the chunks that runs are copied in, and of the longest run.
RUNS = (
    1,
    15,
    16,
    17,
    31,
    32,
    33,
    63,
    64,
    65,
    127,
    129,
    191,
    193,
    256,
    257,
    320,
    321,
    383,
    384,
    385,
)


@pytest.mark.parametrize("channels", RUNS)
def test_every_length_of_a_run(isa: str, channels: int) -> None:
    """Taps that are adjacent make one run of a line; dilated ones make a run each."""
    del isa
    dtype = STORED[channels % 2]
    for w in (window(3, 1, padding=(1, 0)), window(2, 2, padding=1, dilation=2)):
        case = convolution((2, channels, 4, 9), 5, w, dtype=dtype)

        assert torch.equal(case.run(), case.expected()), w


LINES = {
    "first layer": window(7, 7, padding=3, stride=2),
    "small first layer": window(3, 3, padding=1, stride=2),
    "padding beyond a line": window(3, 3, padding=5),
    "uneven": window(3, 5, padding=(0, 4, 2, 1), stride=(1, 3)),
    "only padding beside": window(1, 9, padding=(0, 8)),
    "many runs": window(3, 9, padding=(4, 7), dilation=(1, 2)),
    "more runs than are listed": window(8, 9, padding=9, dilation=2),
    "no row is whole": window(3, 13, padding=(1, 6)),
}


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("channels", [1, 3, 4, 22])
def test_lines_partly_outside(isa: str, name: str, channels: int) -> None:
    del isa
    for size in ((11, 10), (9, 23), (17, 12)):
        case = convolution((2, channels, *size), 7, LINES[name], dtype=torch.uint8)

        assert torch.equal(case.run(), case.expected()), size


@pytest.mark.parametrize("axes", [1, 3])
def test_one_and_three_axes(isa: str, axes: int) -> None:
    del isa
    case = convolution((2, 6, *(7, 5, 9)[-axes:]), 5, window(*[3] * axes, padding=1, stride=2))

    assert torch.equal(case.run(), case.expected())


@pytest.mark.parametrize("name", LINES)
def test_no_byte_behind_the_image_is_read(isa: str, name: str) -> None:
    """Whole chunks are read only where the memory goes on."""
    del isa
    for channels, last in ((1, True), (3, True), (3, False), (33, True)):
        case = convolution((2, channels, 9, 10), 3, LINES[name], dtype=torch.uint8, last=last)
        crop = case.x[:, :, 1:8, 1:9]
        for x in (case.x, crop):
            args, options = case.arguments()

            assert_same_with_guards(convolution_w8a8, (x, *args[1:]), options)
