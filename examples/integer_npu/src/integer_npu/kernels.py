"""The instructions of the accelerator, in numpy: integers in, integers out.

Every function takes the constants of an instruction by name, and its operands. Sums are int32,
rescaled by fixed-point factors to the step of the result, with a few more bits until the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from integer_npu.fixed_point import rescale

Array = NDArray[Any]
Constants = Mapping[str, Array]
Kernel = Callable[[Constants, Sequence[Array]], Array]

TABLE = 1 << 15
"""Half of the entries of a table of 16-bit values."""


def linear(constants: Constants, operands: Sequence[Array]) -> Array:
    """``x @ weight.T + bias``, then the epilogue; ``x`` is ``[..., k]``."""
    x = operands[0].astype(np.int64) - constants["x_zero"]
    total = x @ constants["weight"].astype(np.int64).T + constants["bias"]
    return _finish(constants, total, operands[1:], axis=-1)


def convolution(constants: Constants, operands: Sequence[Array]) -> Array:
    """Convolve ``[batch, channels, *sizes]`` or ``[channels, *sizes]``, then the epilogue."""
    x, weight = operands[0], constants["weight"].astype(np.int64)
    spatial = weight.ndim - 2
    batched = x.ndim == spatial + 2
    # Padding is the float zero: the zero point, which becomes 0 here.
    shifted = (x if batched else x[None]).astype(np.int64) - constants["x_zero"]
    padded = np.pad(shifted, [(0, 0), (0, 0), *map(tuple, constants["padding"])])
    groups = int(constants["groups"])
    parts = zip(np.split(padded, groups, 1), np.split(weight, groups), strict=True)
    total = np.concatenate([_windows(part, w, constants) for part, w in parts], 1)
    total += constants["bias"].reshape(-1, *(1,) * spatial)
    return _finish(constants, total if batched else total[0], operands[1:], axis=-1 - spatial)


def _windows(x: Array, weight: Array, constants: Constants) -> Array:
    """Convolve one group of channels."""
    stride, dilation = constants["stride"], constants["dilation"]
    spatial = weight.ndim - 2
    reach = [int(d) * (k - 1) + 1 for k, d in zip(weight.shape[2:], dilation, strict=True)]
    seen = sliding_window_view(x, reach, tuple(range(2, 2 + spatial)))
    seen = seen[(..., *(slice(None, None, int(d)) for d in dilation))]
    seen = seen[(slice(None), slice(None), *(slice(None, None, int(s)) for s in stride))]
    # From [batch, channels, *sizes, *kernel] to [batch, *sizes, channels * kernel].
    rows = np.moveaxis(seen, 1, 1 + spatial)
    # With the size by name: an empty batch does not determine it.
    rows = rows.reshape(*rows.shape[: 1 + spatial], weight[0].size)
    return np.moveaxis(rows @ weight.reshape(len(weight), -1).T, -1, 1)


def add(constants: Constants, operands: Sequence[Array]) -> Array:
    """Sum values of different steps; the first operand is rescaled as the others are."""
    first = operands[0].astype(np.int64) - constants["x_zero"]
    return _finish(constants, first, operands[1:], axis=-1)


def mul(constants: Constants, operands: Sequence[Array]) -> Array:
    """Multiply the elements of two tensors."""
    first = operands[0].astype(np.int64) - constants["x_zero"]
    second = operands[1].astype(np.int64) - constants["other_zero"]
    return _finish(constants, first * second, (), axis=-1)


def average(constants: Constants, operands: Sequence[Array]) -> Array:
    """Average windows over the last axes; padding is the float zero."""
    kernel, stride = constants["kernel"], constants["stride"]
    shifted = operands[0].astype(np.int64) - constants["x_zero"]
    axes = len(kernel)
    sides = [(0, 0)] * (shifted.ndim - axes) + [(int(p), int(p)) for p in constants["padding"]]
    seen = sliding_window_view(
        np.pad(shifted, sides), [int(k) for k in kernel], tuple(range(-axes, 0))
    )
    steps = tuple(slice(None, None, int(s)) for s in stride)
    sums = seen[(..., *steps, *[slice(None)] * axes)].sum(tuple(range(-axes, 0)))
    return _finish(constants, sums, (), axis=-1)


def mean(constants: Constants, operands: Sequence[Array]) -> Array:
    """Average whole axes."""
    shifted = operands[0].astype(np.int64) - constants["x_zero"]
    axes = tuple(int(axis) for axis in constants["axes"])
    return _finish(constants, shifted.sum(axes, keepdims=bool(constants["keep"])), (), axis=-1)


def lookup(constants: Constants, operands: Sequence[Array]) -> Array:
    """Look 8-bit values up in a table of 256 results."""
    (x,) = operands
    index = x.astype(np.int64) - np.iinfo(x.dtype).min
    found: Array = constants["table"][index]
    return found


def clamp(constants: Constants, operands: Sequence[Array]) -> Array:
    """Clip to two bounds."""
    (x,) = operands
    clipped: Array = np.clip(x, constants["low"], constants["high"]).astype(x.dtype)
    return clipped


def max_pool(constants: Constants, operands: Sequence[Array]) -> Array:
    """The maximum of windows over the last two axes; padding is below every value."""
    (x,) = operands
    kernel, stride = constants["kernel"], constants["stride"]
    dilation, padding = constants["dilation"], constants["padding"]
    sides = [(0, 0)] * (x.ndim - 2) + [(int(p), int(p)) for p in padding]
    padded = np.pad(x, sides, constant_values=np.iinfo(x.dtype).min)
    reach = [int(d) * (int(k) - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    seen = sliding_window_view(padded, reach, (-2, -1))
    seen = seen[..., :: int(stride[0]), :: int(stride[1]), :: int(dilation[0]), :: int(dilation[1])]
    greatest: Array = seen.max((-2, -1))
    return greatest


def _finish(constants: Constants, total: Array, others: Sequence[Array], axis: int) -> Array:
    """Rescale a sum to steps of the result, add other operands, and store 8 bits."""
    shape = [1] * total.ndim
    shape[axis] = -1
    bits = int(constants["bits"])
    y = rescale(total, constants["multiplier"].reshape(shape), constants["shift"].reshape(shape))
    for index, other in enumerate(others):
        shifted = other.astype(np.int64) - constants[f"zero{index}"]
        y = y + rescale(shifted, constants[f"multiplier{index}"], constants[f"shift{index}"])
    if "table" in constants:
        found: Array = constants["table"][np.clip(y, -TABLE, TABLE - 1) + TABLE]
        return found
    if bits:
        y = rescale(y, np.int64(1), np.int64(bits))
    low, high = constants["range"]
    stored: Array = np.clip(y + constants["out_zero"], low, high).astype(constants["like"].dtype)
    return stored


KERNELS: Mapping[str, Kernel] = {
    "linear": linear,
    "convolution": convolution,
    "add": add,
    "mul": mul,
    "average": average,
    "mean": mean,
    "lookup": lookup,
    "clamp": clamp,
    "max_pool": max_pool,
}
"""The kernels by the names of the instructions."""
