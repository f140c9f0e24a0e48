"""Sizes that may be symbolic, compared without adding a guard."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import Argument

Size = int | torch.SymInt


def same_size(a: Size, b: Size) -> bool:
    """Whether two sizes are equal for all values of the symbols."""
    return statically_known_true(a == b)


def same_shape(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Whether two shapes are equal for all values of the symbols."""
    return len(a) == len(b) and all(map(same_size, a, b))


def is_one(size: Size) -> bool:
    """Whether ``size`` is known to be one, decided without guarding a symbol."""
    return isinstance(size, int) and size == 1


def product(sizes: Iterable[Size]) -> Size:
    """Return the product of sizes, some of which may be symbolic."""
    total: Size = 1
    for size in sizes:
        total = total * size
    return total


def broadcast_shape(a: Sequence[Size], b: Sequence[Size]) -> tuple[Size, ...] | None:
    """Return the shape that two shapes broadcast to, or ``None`` if that is not certain."""
    rank = max(len(a), len(b))
    left, right = ((*(1,) * (rank - len(shape)), *shape) for shape in (a, b))
    done: list[Size] = []
    for one, two in zip(left, right, strict=True):
        if not (same_size(one, two) or is_one(one) or is_one(two)):
            return None
        done.append(two if is_one(one) else one)
    return tuple(done)


def is_positive(size: Size) -> bool:
    """Whether a size is at least 1 for all values of the symbols."""
    return statically_known_true(size >= 1)


def is_smaller(a: Size, b: Size) -> bool:
    """Whether ``a`` is less than ``b`` for all values of the symbols."""
    return statically_known_true(a < b)


def is_row_major(value: torch.Tensor) -> bool:
    """Whether ``value`` is contiguous in row-major order."""
    step: Size = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        # An axis of one element may have any stride.
        if not same_size(size, 1):
            if not same_size(stride, step):
                return False
            step = step * size
    return True


def same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape have the same strides on axes larger than 1."""
    return all(
        same_size(size, 1) or same_size(step, other)
        for size, step, other in zip(a.shape, a.stride(), b.stride(), strict=True)
    )


def exact_quotient(a: Size, b: Size) -> Size | None:
    """Return ``a / b`` if it is an integer for all values of the symbols, else ``None``."""
    if same_size(b, 0):
        return None
    quotient: Size = a // b
    # `//` rounds down, also for symbols.
    return quotient if same_size(quotient * b, a) else None


def element_count(shape: Sequence[Size]) -> int | None:
    """Return the number of elements, or ``None`` if it depends on a symbol."""
    known = [s for s in shape if isinstance(s, int)]
    return math.prod(known) if len(known) == len(shape) else None


def size_of(value: Argument) -> Size | None:
    """Return a size from a number or a node of one; ``None`` for anything else."""
    if isinstance(value, Node):
        value = value.meta.get("val")
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        return None
    return value


def sizes_of(value: Argument) -> tuple[Size, ...] | None:
    """Return a list of sizes, or ``None`` if it is not one."""
    if not isinstance(value, (list, tuple)):
        return None
    sizes = [size_of(v) for v in value]
    return tuple(s for s in sizes if s is not None) if None not in sizes else None


def axis_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Return the axes from the largest stride to the smallest; ``None`` if there are gaps.

    Axes of size 1, whose strides are arbitrary, keep their position in a contiguous tensor.
    """
    # Strides of an empty tensor say nothing.
    if 0 in shape:
        return tuple(range(len(shape)))
    real = sorted((a for a, n in enumerate(shape) if n != 1), key=lambda a: (-strides[a], a))
    step = 1
    for axis in reversed(real):
        if strides[axis] != step:
            return None
        step *= shape[axis]
    if real == sorted(real):
        return tuple(range(len(shape)))
    return (*(a for a, n in enumerate(shape) if n == 1), *real)


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """Return the permutation that undoes ``order``: the position of each axis in it."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))
