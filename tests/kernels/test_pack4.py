"""Packed 4-bit weights come back bit for bit, and lie where the kernels read them."""

from __future__ import annotations

import pytest
import torch

from qfuse.ir.errors import InputError
from qfuse.kernels.pack import pack_weight
from qfuse.kernels.pack4 import pack_weight4, unpack_weight4


@pytest.mark.parametrize(("n", "k"), [(1, 1), (64, 8), (65, 9), (130, 31), (64, 128), (0, 8)])
def test_comes_back(n: int, k: int) -> None:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    packed = pack_weight4(codes)
    assert packed.is_contiguous()
    assert torch.equal(unpack_weight4(packed, n, k), codes)


def test_halves_are_neighbouring_groups() -> None:
    codes = torch.randint(0, 16, (70, 24), dtype=torch.uint8)
    packed = pack_weight4(codes)
    apart = torch.stack([packed & 15, packed >> 4], 2).flatten(1, 2)
    assert torch.equal(apart.to(torch.int8), pack_weight(codes.to(torch.int8))[0])


def test_refuses_what_is_no_code() -> None:
    with pytest.raises(InputError, match="a code is 16"):
        pack_weight4(torch.full((2, 2), 16, dtype=torch.uint8))
    with pytest.raises(InputError, match="uint8"):
        pack_weight4(torch.zeros(2, 2, dtype=torch.int8))
    with pytest.raises(InputError, match="n=3, k=8"):
        unpack_weight4(torch.zeros(1, 2, 64, 4, dtype=torch.uint8), 3, 8)
