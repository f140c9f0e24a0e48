from __future__ import annotations

import errno

import pytest
import torch

from qfuse.ir.errors import CaptureError, OutOfMemoryError
from qfuse.ir.out_of_memory import out_of_memory_errors, shortage_of

SHORTAGES = [
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    RuntimeError("unable to mmap 8 bytes: Cannot allocate memory (12)"),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    torch.OutOfMemoryError("CUDA out of memory"),
]


@pytest.mark.parametrize("error", SHORTAGES, ids=lambda error: type(error).__name__)
def test_every_library_says_it_in_its_own_way(error: Exception) -> None:
    with pytest.raises(OutOfMemoryError) as raised, out_of_memory_errors("baking bread"):
        raise error

    assert raised.value.what.startswith("memory ran out while baking bread: ")
    assert raised.value.fix is not None
    assert isinstance(raised.value, MemoryError)
    assert raised.value.__cause__ is error


def test_an_allocator_of_torch_is_recognized() -> None:
    with pytest.raises(OutOfMemoryError, match="you tried to allocate"), out_of_memory_errors("x"):
        torch.empty(1 << 60, dtype=torch.uint8)


def test_it_may_be_the_cause_of_another_error() -> None:
    told = CaptureError("the model does not run on its example inputs")
    told.__cause__ = SHORTAGES[0]

    with pytest.raises(OutOfMemoryError, match="can't allocate"), out_of_memory_errors("x"):
        raise told


@pytest.mark.parametrize(
    "error",
    [RuntimeError("shapes differ"), OSError(errno.ENOSPC, "disk full"), CaptureError("no")],
    ids=["other", "disk", "model"],
)
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    assert shortage_of(error) is None
    with pytest.raises(type(error)) as raised, out_of_memory_errors("x"):
        raise error

    assert raised.value is error


def test_an_error_is_told_once() -> None:
    told = OutOfMemoryError("memory ran out while resting")
    with pytest.raises(OutOfMemoryError) as raised, out_of_memory_errors("x"):
        raise told

    assert raised.value is told
