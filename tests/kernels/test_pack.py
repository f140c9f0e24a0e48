from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.cases.linear_kernel import codes

from qfuse.ir.errors import InputError
from qfuse.kernels import pack_weight, unpack_weight


@pytest.mark.property
@given(st.integers(0, 200), st.integers(0, 70))
def test_unpack_undoes_pack(n: int, k: int) -> None:
    weight = codes((n, k), torch.int8)

    packed, _ = pack_weight(weight)

    assert torch.equal(unpack_weight(packed, n, k), weight)


def test_the_layout_is_blocks_of_64_features_and_groups_of_4() -> None:
    weight = codes((70, 6), torch.int8)

    packed, _ = pack_weight(weight)

    assert packed.shape == (2, 2, 64, 4)
    assert packed.is_contiguous()
    for n in range(128):
        for k in range(8):
            expected = weight[n, k] if n < 70 and k < 6 else 0
            assert packed[n // 64, k // 4, n % 64, k % 4] == expected


def test_sums_are_of_the_weight_without_its_zero_point() -> None:
    weight = codes((5, 300), torch.int8)
    zero = torch.tensor([3, -2, 0, 100, -100], dtype=torch.int8)

    _, plain = pack_weight(weight)
    _, moved = pack_weight(weight, zero)

    assert plain.dtype == moved.dtype == torch.int32
    assert torch.equal(plain.long(), weight.long().sum(1))
    assert torch.equal(moved.long(), (weight.long() - zero.long()[:, None]).sum(1))


@pytest.mark.parametrize("half", [1, 64, 70])
def test_halves_begin_with_a_block_of_their_own(half: int) -> None:
    weight, zero = codes((2 * half, 6), torch.int8), torch.arange(2 * half) % 100

    packed, sums = pack_weight(weight, zero, halves=True)

    blocks = -(-half // 64)
    assert packed.is_contiguous()
    assert torch.equal(unpack_weight(packed[:blocks], half, 6), weight[:half])
    assert torch.equal(unpack_weight(packed[blocks:], half, 6), weight[half:])
    assert torch.equal(sums, pack_weight(weight, zero)[1])
    with pytest.raises(InputError, match="cannot be split into halves"):
        pack_weight(codes((5, 6), torch.int8), halves=True)


def test_packing_copies_a_strided_weight_right() -> None:
    weight = codes((12, 40), torch.int8).t()

    packed, _ = pack_weight(weight)

    assert torch.equal(unpack_weight(packed, 40, 12), weight)


@pytest.mark.parametrize("bad", [torch.zeros(3, 4), torch.zeros(4, dtype=torch.int8)])
def test_refuses_what_is_no_int8_matrix(bad: torch.Tensor) -> None:
    with pytest.raises(InputError, match="int8"):
        pack_weight(bad)


@pytest.mark.parametrize(("n", "k"), [(65, 8), (64, 9), (0, 8)])
def test_unpack_refuses_another_size(n: int, k: int) -> None:
    packed, _ = pack_weight(codes((64, 8), torch.int8))

    with pytest.raises(InputError, match="packed weight"):
        unpack_weight(packed, n, k)
