"""Operands that end where memory ends: what reads or writes past them ends the process.

AddressSanitizer (``make asan``) sees more, but needs a build of its own; this works on the library
that everybody runs.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from qfuse.kernels.rowwise import RowwiseOutput

_NO_ACCESS = 0


def guarded(tensor: torch.Tensor, *, at_start: bool = False) -> torch.Tensor:
    """Return a copy with the same strides whose last element lies before a page without access.

    Args:
        tensor: What to copy; its strides are kept, so what lies between rows is there as well.
        at_start: Put the page before the first element instead.
    """
    if tensor.numel() == 0:
        return tensor.clone()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in steps)
    space = _between_guards(extent * tensor.element_size(), at_start=at_start)
    flat = space.view(tensor.dtype)
    copy = flat.as_strided(tensor.shape, tensor.stride())
    # Axes of stride 0 or 1 overlap: written as they lie in memory.
    flat.copy_(tensor.as_strided((extent,), (1,)))
    return copy


def guarded_arguments(
    args: tuple[Any, ...], options: dict[str, Any], *, at_start: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with every tensor among them guarded, in lists and outputs too."""

    def guard(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return guarded(value, at_start=at_start)
        if isinstance(value, RowwiseOutput):
            return replace(value, scale=guard(value.scale), zero_point=guard(value.zero_point))
        return [guard(one) for one in value] if isinstance(value, list) else value

    return tuple(guard(value) for value in args), {k: guard(v) for k, v in options.items()}


def assert_same_with_guards(
    op: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Call an op on ordinary operands and on guarded ones, and compare all results by bits."""
    expected = op(*args, **options)
    for at_start in (False, True):
        inputs, named = guarded_arguments(args, options, at_start=at_start)
        found = op(*inputs, **named)
        for one, other in zip(_listed(found), _listed(expected), strict=True):
            assert torch.equal(
                one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
            )


def _listed(results: Any) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else list(results)


def _between_guards(count: int, *, at_start: bool) -> torch.Tensor:
    """Return that many bytes, with a page without access behind or before them."""
    page = mmap.PAGESIZE
    whole = -(-count // page) * page
    memory = mmap.mmap(-1, whole + 2 * page)
    everything = torch.frombuffer(memory, dtype=torch.uint8)
    library = ctypes.CDLL(None, use_errno=True)
    for start in (0, whole + page):
        address = ctypes.c_void_p(everything.data_ptr() + start)
        if library.mprotect(address, ctypes.c_size_t(page), _NO_ACCESS) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    first = page if at_start else page + whole - count
    return everything[first : first + count]
