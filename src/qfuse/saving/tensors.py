"""Tensors in one block of bytes: shared memory stays shared, and reading copies nothing."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from qfuse.ir.errors import ModelFileError
from qfuse.ir.words import a_kind

ALIGNMENT = 64
"""Of each storage in the block: that of torch's own allocator, which vector code expects."""

Block: TypeAlias = memoryview | mmap.mmap


@dataclass(slots=True)
class _Piece:
    """The part of a storage that tensors use: bytes ``low`` to ``high``."""

    storage: torch.UntypedStorage
    low: int
    high: int
    mutable: bool = False
    offset: int = 0
    data: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def place(self, offset: int) -> int:
        """Fix where its bytes are in the block and what they are; return where they end."""
        self.low -= self.low % ALIGNMENT
        self.offset = offset
        size = self.high - self.low
        self.data = torch.empty(0, dtype=torch.uint8).set_(self.storage, self.low, (size,), (1,))
        if self.mutable:
            # The bytes are used twice, and a call in another thread may write them in between.
            self.data = self.data.clone()
        return offset + -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(slots=True)
class TensorWriter:
    """Collects tensors; those that share memory share it in the file too."""

    _pieces: dict[int, _Piece] = field(default_factory=dict)
    _tensors: list[torch.Tensor] = field(default_factory=list)

    def add(self, name: str, tensor: torch.Tensor, *, mutable: bool = False) -> int:
        """Add a tensor and return its number.

        Args:
            name: What it is, for messages.
            tensor: The tensor.
            mutable: Whether calls of the model write it.

        Raises:
            ModelFileError: It is not a plain tensor in the memory of the CPU.
        """
        reason = _refusal(tensor)
        if reason is not None:
            raise ModelFileError(
                f"{name} is {reason}, which cannot be saved",
                fix="compile on the CPU with plain tensors",
            )
        tensor = tensor.detach().resolve_neg().resolve_conj()
        self._tensors.append(tensor)
        if tensor.numel():
            low, high = _span(tensor)
            storage = tensor.untyped_storage()
            piece = self._pieces.setdefault(storage.data_ptr(), _Piece(storage, low, high))
            piece.low, piece.high = min(piece.low, low), max(piece.high, high)
            piece.mutable |= mutable
        return len(self._tensors) - 1

    def table(self) -> list[dict[str, Any]]:
        """Return where each tensor lies in the block."""
        end = 0
        for piece in self._pieces.values():
            end = piece.place(end)
        return [self._entry(tensor) for tensor in self._tensors]

    def chunks(self) -> Iterator[memoryview]:
        """Yield the bytes of the block, after :meth:`table`."""
        for piece in self._pieces.values():
            yield piece.data.numpy().data.cast("B")
            yield memoryview(bytes(-piece.data.numel() % ALIGNMENT))

    def _entry(self, tensor: torch.Tensor) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "strides": list(tensor.stride()),
        }
        if not tensor.numel():
            return entry
        piece = self._pieces[tensor.untyped_storage().data_ptr()]
        # The storage begins at the first byte that a tensor uses, rounded down.
        start = tensor.storage_offset() * tensor.element_size() - piece.low
        return {**entry, "storage": [piece.offset, piece.high - piece.low], "start": start}


@dataclass(slots=True)
class TensorReader:
    """Makes tensors of a block; the block lives as long as one of them.

    Attributes:
        block: The bytes.
        begin: Where the block begins.
        size: How many bytes it has.
        table: What :meth:`TensorWriter.table` returned.
    """

    block: Block
    begin: int
    size: int
    table: list[dict[str, Any]]
    _storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def __getitem__(self, number: int) -> torch.Tensor:
        entry = self.table[number]
        dtype = getattr(torch, entry["dtype"])
        shape, strides = tuple(entry["shape"]), tuple(entry["strides"])
        if "storage" not in entry:
            return torch.empty_strided(shape, strides, dtype=dtype)
        offset, size = entry["storage"]
        step = torch.empty(0, dtype=dtype).element_size()
        last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) * step
        if not 0 <= entry["start"] <= entry["start"] + last + step <= size:
            raise ValueError(f"tensor {number} exceeds its storage")
        storage = self._storage(offset, size)
        # Of 64 bytes is a multiple of each element, so the start is one too.
        made = torch.empty(0, dtype=dtype)
        return made.set_(storage, entry["start"] // step, shape, strides)

    def _storage(self, offset: int, size: int) -> torch.UntypedStorage:
        if offset not in self._storages:
            if not 0 <= offset <= offset + size <= self.size:
                raise ValueError("a storage exceeds the file")
            flat = torch.frombuffer(
                self.block, dtype=torch.uint8, count=size, offset=self.begin + offset
            )
            self._storages[offset] = flat.untyped_storage()
        return self._storages[offset]


def _refusal(tensor: object) -> str | None:
    """Return what a value is instead of a plain tensor; ``None`` for a plain one."""
    if type(tensor) not in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}:
        return a_kind(tensor)
    assert isinstance(tensor, torch.Tensor), "one of the types above"
    if tensor.layout is not torch.strided:
        return f"a {tensor.layout} tensor"
    if tensor.device.type != "cpu":
        return f"on {tensor.device}"
    return "a quantized tensor of torch" if tensor.is_quantized else None


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range of bytes of its storage that a tensor uses."""
    size = tensor.element_size()
    first = int(tensor.storage_offset())
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = first + sum((length - 1) * step for length, step in pairs)
    return first * size, (last + 1) * size
