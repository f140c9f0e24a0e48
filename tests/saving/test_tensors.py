"""Tensors come back with their bits, strides and aliases, without a copy."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable

import pytest
import torch

from qfuse.ir.errors import ModelFileError
from qfuse.saving.tensors import ALIGNMENT, TensorReader, TensorWriter


def through(*tensors: torch.Tensor, before: int = 0) -> list[torch.Tensor]:
    writer = TensorWriter()
    for tensor in tensors:
        writer.add("value", tensor)
    table = json.loads(json.dumps(writer.table()))
    data = b"".join(writer.chunks())
    block = mmap.mmap(-1, max(before + len(data), 1))
    block[before : before + len(data)] = data
    reader = TensorReader(block, before, len(data), table)
    return [reader[i] for i in range(len(tensors))]


def base() -> torch.Tensor:
    return torch.arange(240.0).reshape(4, 6, 10)


CASES: dict[str, Callable[[], torch.Tensor]] = {
    "plain": base,
    "offset": lambda: base()[1:, 2:],
    "turned": lambda: base().permute(2, 0, 1),
    "expanded": lambda: base()[:1, :1].expand(5, 7, 10),
    "every other": lambda: base()[..., ::3],
    "scalar": lambda: torch.tensor(3.5, dtype=torch.float64),
    "empty": lambda: torch.empty(2, 0, 3),
    "channels last": lambda: torch.randn(1, 3, 4, 5).to(memory_format=torch.channels_last),
    "bf16": lambda: torch.randn(7).bfloat16(),
    "float8": lambda: torch.randn(7).to(torch.float8_e4m3fn),
    "bool": lambda: torch.tensor([True, False, True]),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "odd offset": lambda: torch.arange(100, dtype=torch.int8)[7:20],
    "parameter": lambda: torch.nn.Parameter(torch.randn(3)),
    "one column": lambda: base()[:, :, 9:],
}


def bits(value: torch.Tensor) -> bytes:
    flat = value.detach().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("before", [0, 4096])
def test_tensors_survive(case: str, before: int) -> None:
    value = CASES[case]()
    (again,) = through(value, before=before)
    assert (again.dtype, again.shape, again.stride()) == (value.dtype, value.shape, value.stride())
    assert bits(again) == bits(value)
    assert not again.requires_grad


def test_shared_memory_stays_shared() -> None:
    whole = torch.arange(12.0)
    other = torch.arange(12.0)
    first, tail, row, apart = through(whole, whole[5:], whole.view(3, 4)[1], other)
    first.add_(100)
    assert torch.equal(tail, first[5:])
    assert torch.equal(row, first[4:8])
    assert torch.equal(apart, other)


def test_only_what_is_used_is_saved() -> None:
    big = torch.zeros(100_000)
    writer = TensorWriter()
    writer.add("a", big[50_000:50_010])
    writer.add("b", big[50_020:50_030])
    writer.table()
    assert sum(map(len, writer.chunks())) <= 30 * 4 + 2 * ALIGNMENT


@pytest.mark.parametrize("mutable", [True, False])
def test_values_that_calls_write_are_those_of_one_moment(mutable: bool) -> None:
    value = torch.zeros(20)
    writer = TensorWriter()
    writer.add("constant part", value[10:])
    writer.add("state", value[:10], mutable=mutable)
    writer.table()
    chunks = list(writer.chunks())
    value.fill_(1)
    assert any(b"".join(chunks)) is not mutable


def test_storages_are_aligned() -> None:
    made = through(torch.ones(3, dtype=torch.int8), torch.ones(5), torch.ones(1, dtype=torch.bool))
    assert [value.untyped_storage().data_ptr() % ALIGNMENT for value in made] == [0, 0, 0]


def test_values_of_lazy_views() -> None:
    value = torch.complex(torch.ones(2), -torch.ones(2)).conj()
    (again,) = through(value.imag)
    assert torch.equal(again, torch.ones(2))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (lambda: torch.empty(3, device="meta"), "on meta"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            "quantized tensor",
        ),
        (lambda: torch.eye(3).to_mkldnn(), "mkldnn"),
    ],
    ids=["sparse", "meta", "quantized", "opaque"],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_others_are_refused(make: Callable[[], torch.Tensor], words: str) -> None:
    value = make()
    with pytest.raises(ModelFileError, match=words) as error:
        TensorWriter().add("fc.weight", value)
    assert "fc.weight" in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"start": 4},
        {"start": -4},
        {"shape": [1000]},
        {"storage": [4096, 64]},
        {"storage": [-64, 64]},
    ],
    ids=str,
)
def test_nothing_outside_the_file_is_read(change: dict[str, object]) -> None:
    writer = TensorWriter()
    writer.add("x", torch.arange(16.0))
    (entry,) = writer.table()
    data = b"".join(writer.chunks())
    block = mmap.mmap(-1, len(data))
    with pytest.raises(ValueError, match="exceeds"):
        TensorReader(block, 0, len(data), [{**entry, **change}])[0]
