"""Images joined along their channels: torch.cat is the reference, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from tests.support.cases.fake_kernels import OPCHECKS
from tests.support.cases.linear_kernel import STORED, codes
from tests.support.guard_pages import assert_same_with_guards

from qfuse.ir.errors import InputError
from qfuse.kernels import cat_channels

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("library")]

# Runs that have a copy of their own, and others around them.
CHANNELS = ((16, 32), (64, 32, 32), (1, 2, 3), (5, 16, 33), (31, 64, 65, 0, 7), (256, 24), (8,))
SIZES = ((2, 5, 3), (1, 7, 9), (3, 1, 4), (1, 1, 1), (2, 3, 2, 3), (1, 40, 41))


FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def last(x: torch.Tensor) -> torch.Tensor:
    """The same values, channels-last."""
    return x.contiguous(memory_format=FORMATS[x.dim()])


def part_of_a_split(x: torch.Tensor) -> torch.Tensor:
    """The same values as a part of the channels of another image."""
    n, c, *sizes = x.shape
    wide = last(codes((n, c + 5, *sizes), x.dtype))
    wide[:, 2 : c + 2] = x
    return wide[:, 2 : c + 2]


def images(size: Sequence[int], channels: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    n, *sizes = size
    return [codes((n, c, *sizes), dtype) for c in channels]


LAYOUTS: dict[str, Callable[[list[torch.Tensor]], list[torch.Tensor]]] = {
    "channels-last": lambda parts: [last(x) for x in parts],
    "parts of splits": lambda parts: [part_of_a_split(x) for x in parts],
    "rows": lambda parts: parts,
    "one of each": lambda parts: [
        (last, part_of_a_split, torch.Tensor.contiguous)[i % 3](x) for i, x in enumerate(parts)
    ],
    "lines apart": lambda parts: [
        last(torch.nn.functional.pad(x, (1, 2)))[..., 1:-2] for x in parts
    ],
    "turned": lambda parts: [x.flip(-1).transpose(-1, -2).contiguous().mT.flip(-1) for x in parts],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", STORED)
def test_it_is_torch_cat(layout: str, dtype: torch.dtype) -> None:
    for size in SIZES:
        for channels in CHANNELS:
            whole = images(size, channels, dtype)
            parts = LAYOUTS[layout](whole)
            assert all(map(torch.equal, parts, whole))

            y = cat_channels(parts[0], parts[1:])

            expected = torch.cat(whole, 1)
            assert torch.equal(y, expected)
            assert y.stride() == torch.empty(y.shape, memory_format=FORMATS[y.dim()]).stride()
            assert y.dtype is dtype


@pytest.mark.parametrize("dtype", STORED)
def test_the_same_image_twice_and_one_for_all_of_a_batch(dtype: torch.dtype) -> None:
    (x,) = map(last, images((2, 5, 3), (32,), dtype))
    one = last(x[:1]).expand(2, -1, -1, -1)

    y = cat_channels(x, [one, x])

    assert torch.equal(y, torch.cat([x, one, x], 1))


def test_the_operands_stay_and_the_result_is_new() -> None:
    (x,) = map(last, images((1, 4, 4), (16,), torch.uint8))
    before = x.clone()

    y = cat_channels(x, None)
    y.zero_()

    assert torch.equal(x, before)


def test_no_pixel() -> None:
    for size in ((0, 4, 4), (2, 0, 4)):
        parts = [torch.empty(size[0], c, *size[1:], dtype=torch.int8) for c in (3, 4)]
        assert cat_channels(parts[0], parts[1:]).shape == torch.cat(parts, 1).shape
    nothing = [torch.empty(2, 0, 4, 4, dtype=torch.int8)] * 2
    assert cat_channels(nothing[0], nothing[1:]).shape == (2, 0, 4, 4)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("layout", ["channels-last", "parts of splits", "rows", "lines apart"])
def test_it_reads_and_writes_nothing_else(channels: tuple[int, ...], layout: str) -> None:
    for size in SIZES:
        parts = LAYOUTS[layout](images(size, channels, torch.uint8))
        assert_same_with_guards(cat_channels, (parts[0], parts[1:]), {})


def test_threads_do_not_matter() -> None:
    parts = LAYOUTS["channels-last"](images((2, 57, 31), (64, 32, 5), torch.int8))
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(cat_channels(parts[0], parts[1:]))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(y, torch.cat(parts, 1)) for y in found)


WRONG = {
    "4 or 5 axes": [torch.zeros(2, 3, 4, dtype=torch.int8)],
    "int8 or uint8": [torch.zeros(2, 3, 4, 4)] * 2,
    "channels only": [torch.zeros(2, 3, 4, n, dtype=torch.int8) for n in (4, 5)],
    "channels only: ": [torch.zeros(2, 3, 4, 4, dtype=t) for t in (torch.int8, torch.uint8)],
}


@pytest.mark.parametrize("message", WRONG)
def test_what_it_refuses(message: str) -> None:
    first, *others = WRONG[message]
    with pytest.raises(RuntimeError, match=message):
        cat_channels(first, others)
    with pytest.raises(InputError, match=message):
        cat_channels(first.to("meta"), [x.to("meta") for x in others])


@pytest.mark.parametrize("size", SIZES)
def test_the_fake_is_like_the_result(size: tuple[int, ...]) -> None:
    parts = LAYOUTS["one of each"](images(size, (5, 16, 33), torch.uint8))
    y = cat_channels(parts[0], parts[1:])

    fake = cat_channels(parts[0].to("meta"), [x.to("meta") for x in parts[1:]])

    assert (fake.shape, fake.stride(), fake.dtype) == (y.shape, y.stride(), y.dtype)
    arguments = (parts[0], parts[1:])
    torch.library.opcheck(torch.ops.qfuse.cat_channels.default, arguments, test_utils=OPCHECKS)
