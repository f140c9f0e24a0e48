"""Where packed weights lie."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from qfuse.ir.quant.spec import QuantSpec
from qfuse.kernels import pack_bytes
from qfuse.lower.operands.packing import Packed, Packer
from qfuse.targets.huge_pages import HugePages

SPEC = QuantSpec(torch.int8, -128, 127, (1, None))


@pytest.fixture
def packer(tmp_path: Path) -> Packer:
    setting = tmp_path / "enabled"
    setting.write_text("[always] madvise never\n")
    return Packer(HugePages(setting))


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_packed_weights_lie_one_after_the_other(packer: Packer) -> None:
    weights = [torch.randint(-128, 128, (512, 256), dtype=torch.int8) for _ in range(3)]
    packed = [packer.pack_values(weight, SPEC, 8) for weight in weights]
    for weight, found in zip(weights, packed, strict=True):
        assert torch.equal(found, pack_bytes(weight))
    addresses = [found.data_ptr() for found in packed]
    assert addresses == [addresses[0] + i * weights[0].nbytes for i in range(3)]


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_every_tensor_of_a_result_is_placed_once(packer: Packer) -> None:
    stored = torch.zeros(512, 256, dtype=torch.int8)
    values = packer.pack_values(stored, SPEC, 8)
    sums = torch.arange(1 << 16, dtype=torch.int32)

    made = packer.once(lambda: Packed(values, sums, None), (stored,), "a dataclass")
    parts = packer.once(lambda: (values, sums, 3), (stored,), "a tuple")

    assert made.weight is values
    assert parts[0] is values
    assert made.zero_point is None
    assert parts[2] == 3
    for placed in (made.sums, parts[1]):
        assert placed is not sums
        assert torch.equal(placed, sums)
