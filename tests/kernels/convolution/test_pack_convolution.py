from __future__ import annotations

from math import prod

import pytest
import torch
from tests.support.cases.linear_kernel import codes

from qfuse.ir.errors import InputError
from qfuse.kernels import (
    convolution_sums,
    pack_convolution,
    pack_depthwise,
    pack_transposed,
    transposed_sums,
    unpack_convolution,
)
from qfuse.kernels.pack_convolution import depthwise_groups, taps_of_phases


@pytest.mark.parametrize("kernel", [(3,), (1, 1), (3, 2), (1, 2, 3)])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(("n", "channels"), [(1, 1), (5, 6), (64, 4), (70, 3), (0, 4), (3, 0)])
def test_unpack_undoes_pack(kernel: tuple[int, ...], groups: int, n: int, channels: int) -> None:
    weight = codes((n * groups, channels, *kernel), torch.int8)

    packed = pack_convolution(weight, groups)

    depth = -(-prod(kernel) * channels // 4)
    assert packed.shape == (groups, -(-n // 64), depth, 64, 4)
    assert packed.is_contiguous()
    assert torch.equal(unpack_convolution(packed, weight.shape, groups), weight)


def test_taps_come_before_channels() -> None:
    weight = codes((140, 3, 2, 5), torch.int8)

    packed = pack_convolution(weight, 2)

    for n, channel, y, x in ((0, 0, 0, 0), (69, 2, 1, 4), (70, 1, 0, 3), (139, 0, 1, 1)):
        k, feature = (y * 5 + x) * 3 + channel, n % 70
        element = packed[n // 70, feature // 64, k // 4, feature % 64, k % 4]
        assert element == weight[n, channel, y, x]
    assert not packed[:, :, -1, :, 2:].any()


def test_sums_are_of_the_weight_without_its_zero_point() -> None:
    weight = codes((5, 7, 3, 3), torch.int8)
    zero = torch.tensor([3, -2, 0, 100, -100], dtype=torch.int8)

    moved = convolution_sums(weight, zero)

    assert moved.dtype == torch.int32
    assert torch.equal(convolution_sums(weight).long(), weight.long().sum((1, 2, 3)))
    expected = (weight.long() - zero.long().reshape(-1, 1, 1, 1)).sum((1, 2, 3))
    assert torch.equal(moved.long(), expected)


def test_phases_share_out_the_taps() -> None:
    assert taps_of_phases((3,), (2,), (1,)) == [([2, 0],), ([1],)]
    assert taps_of_phases((2,), (3,), (1,)) == [([0],), ([1],), ([],)]
    assert taps_of_phases((3,), (2,), (2,)) == [([2, 1, 0],), ([],)]
    assert taps_of_phases((4,), (4,), (2,)) == [([2, 0],), ([],), ([3, 1],), ([],)]
    two = taps_of_phases((3, 2), (2, 1), (1, 1))
    assert two == [([2, 0], [1, 0]), ([1], [1, 0])]


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_weights_are_packed_by_phase(groups: int) -> None:
    weight = codes((3 * groups, 5, 3, 2), torch.int8)
    zero = torch.arange(5 * groups)

    packed = pack_transposed(weight, (2, 1), (1, 1), groups)
    sums = transposed_sums(weight, (2, 1), (1, 1), groups, zero)

    ordinary = weight.unflatten(0, (groups, 3)).transpose(1, 2).flatten(0, 1)  # type: ignore[no-untyped-call]
    first, second = ordinary.flip(2, 3)[:, :, ::2], ordinary.flip(3)[:, :, 1:2]
    assert torch.equal(packed[:, :, :3], pack_convolution(first, groups))
    assert torch.equal(packed[:, :, 3:], pack_convolution(second, groups))
    assert torch.equal(sums[0], convolution_sums(first, zero))
    assert torch.equal(sums[1], convolution_sums(second, zero))


@pytest.mark.parametrize("kernel", [(1,), (3,), (4,), (2, 2), (3, 1), (3, 3), (2, 5), (2, 3, 3)])
def test_taps_of_depthwise_weights_are_in_fours(kernel: tuple[int, ...]) -> None:
    weight = codes((70, 1, *kernel), torch.int8)

    packed = pack_depthwise(weight)

    groups = depthwise_groups(kernel)
    assert packed.shape == (2, groups, 64, 4)
    # Of 16 channels after the other, four in turn.
    channels = packed.reshape(2, groups, 4, 4, 4, 4).transpose(2, 3).reshape(packed.shape)
    taps = channels.permute(0, 2, 1, 3).reshape(128, groups * 4)[:70]
    if kernel[-1] >= 3:
        taps = taps.reshape(70, prod(kernel[:-1]), -1)[..., : kernel[-1]]
    assert torch.equal(taps.flatten(1)[:, : prod(kernel)].reshape(weight.shape), weight)
    assert packed.count_nonzero() == weight.count_nonzero()


def test_refuses_what_is_no_weight() -> None:
    weight = torch.zeros(6, 4, 3, 3, dtype=torch.int8)
    for bad in (weight[..., 0, 0], weight[..., None, None]):
        with pytest.raises(InputError, match="1 to 3 spatial axes"):
            pack_convolution(bad)
    with pytest.raises(InputError, match="int8"):
        pack_convolution(weight.float())
    with pytest.raises(InputError, match="6 output channels cannot be split into 4 groups"):
        pack_convolution(weight, 4)
    with pytest.raises(InputError, match="6 channels cannot be split into 4 groups"):
        pack_transposed(weight, (1, 1), (1, 1), 4)
    with pytest.raises(InputError, match="one input channel, not 4"):
        pack_depthwise(weight)
    with pytest.raises(InputError, match="packed weight"):
        unpack_convolution(pack_convolution(weight), (6, 5, 3, 3))
    with pytest.raises(InputError, match="1 groups, not 2"):
        unpack_convolution(pack_convolution(weight), (6, 4, 3, 3), 2)
