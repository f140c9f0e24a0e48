"""Weights in huge pages: values stay, and tensors lie one after the other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from qfuse.targets.huge_pages import HugePages

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


@pytest.fixture
def pages(tmp_path: Path) -> HugePages:
    setting = tmp_path / "enabled"
    setting.write_text("always [madvise] never\n")
    return HugePages(setting)


@needs_linux
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.float32, torch.float16, torch.bfloat16]
)
def test_a_copy_has_the_same_values(pages: HugePages, dtype: torch.dtype) -> None:
    tensor = torch.randint(-100, 100, (3, 101, 1000)).to(dtype)
    placed = pages.place(tensor)
    assert placed is not tensor
    assert placed.dtype is dtype
    assert torch.equal(placed, tensor)
    assert placed.is_contiguous()
    # Saving and the search for aliases go by storages.
    assert placed.untyped_storage().nbytes() == tensor.nbytes
    assert placed.storage_offset() == 0


@needs_linux
def test_float8_keeps_its_bits(pages: HugePages) -> None:
    tensor = torch.arange(256).to(torch.uint8).repeat(512).view(torch.float8_e4m3fn)
    placed = pages.place(tensor)
    assert torch.equal(placed.view(torch.uint8), tensor.view(torch.uint8))


@needs_linux
def test_tensors_lie_one_after_the_other(pages: HugePages) -> None:
    first = pages.place(torch.ones(100_001, dtype=torch.uint8))
    second = pages.place(torch.ones(70_000, dtype=torch.float32))
    assert first.data_ptr() % (2 << 20) == 0
    assert 0 <= second.data_ptr() - first.data_ptr() - first.nbytes < 128
    assert second.data_ptr() % 128 == 0


@needs_linux
def test_areas_end(pages: HugePages) -> None:
    pages.place(torch.ones(1 << 20, dtype=torch.uint8))
    large = torch.arange(9 << 20, dtype=torch.int64)  # larger than an area
    assert torch.equal(pages.place(large), large)
    after = torch.arange(1 << 20)
    assert torch.equal(pages.place(after), after)


@needs_linux
def test_tensors_outlive_their_pages(tmp_path: Path) -> None:
    setting = tmp_path / "enabled"
    setting.write_text("[always] madvise never\n")
    placed = HugePages(setting).place(torch.full((1 << 18,), 7, dtype=torch.int32))
    assert bool((placed == 7).all())
    placed.add_(1)
    assert bool((placed == 8).all())


def test_small_and_strided_tensors_stay(pages: HugePages) -> None:
    for tensor in (
        torch.ones(10),
        torch.ones(0),
        torch.ones(1024, 1024).t(),
        torch.ones(1024, 1024, requires_grad=True),
        torch.nn.Parameter(torch.ones(1024, 1024)),
        torch.ones(1024, 1024, device="meta"),
    ):
        assert pages.place(tensor) is tensor


@pytest.mark.parametrize("content", ["always madvise [never]\n", None])
def test_the_administrator_may_forbid_them(tmp_path: Path, content: str | None) -> None:
    setting = tmp_path / "enabled"
    if content is not None:
        setting.write_text(content)
    tensor = torch.ones(1 << 20)
    assert HugePages(setting).place(tensor) is tensor


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(9), torch.arange(1 << 18).view(512, 512).t(), torch.arange(1 << 18)],
    ids=["small", "strided", "plain"],
)
def test_any_tensor_can_be_copied(pages: HugePages, tensor: torch.Tensor) -> None:
    copied = pages.copy(tensor)

    assert copied.data_ptr() != tensor.data_ptr()
    assert copied.stride() == tensor.stride()
    assert torch.equal(copied, tensor)
