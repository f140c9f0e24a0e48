"""Checks of shapes and dtypes of kernel ops' arguments while torch traces.

The op raises the same errors at run time; checking here rejects an invalid graph while tracing.
Checks that depend on the number of rows are left to the op: here they would guard a symbolic size.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from qfuse.ir.dtypes import BYTES, FLOAT8, FLOATS
from qfuse.ir.errors import InputError
from qfuse.kernels.pack import BLOCK, GROUP

_HALF = 16
_WORD = 32

PACKED_DTYPES = {
    4: (torch.uint8,),
    8: (torch.int8, *FLOAT8),
    16: (torch.float16,),
}
"""The dtypes of packed weights, by the bits of their values."""


def glu_factor(epilogue: str) -> int:
    """Return 2 if an epilogue contains a GLU, which halves the features, else 1."""
    names = {step.partition("(")[0] for step in epilogue.split("|")}
    return 2 if names & {"glu", "halves"} else 1


def check_stored(x: torch.Tensor) -> None:
    """Check that an activation is quantized and has at least one axis."""
    if x.dtype not in BYTES:
        raise InputError(f"x must be int8 or uint8, not {x.dtype}")
    _check_axes(x)


def check_floats(x: torch.Tensor, **types: torch.dtype) -> None:
    """Check that an activation and the named dtypes are in :data:`~qfuse.ir.dtypes.FLOATS`."""
    given = {"x": x.dtype, **types}
    if not set(given.values()) <= set(FLOATS):
        found = ", ".join(map(str, given.values()))
        raise InputError(f"{', '.join(given)} must be floats, not {found}")
    _check_axes(x)


def _check_axes(x: torch.Tensor) -> None:
    if x.dim() == 0:
        raise InputError("x must have at least one axis")


def check_packed(
    x: torch.Tensor,
    w_packed: torch.Tensor,
    bits: int,
    n: int,
    halves: int = 1,
    *,
    floats: bool = False,
) -> tuple[int, int]:
    """Check that a packed weight matches its activation.

    Args:
        x: Activation ``[..., K]``.
        w_packed: The weight.
        bits: Of its values; see :data:`PACKED_DTYPES`.
        n: Output features.
        halves: Number of GLU halves, each of which starts a new block.
        floats: Whether the values may be floats.

    Returns:
        The number of features per half, and the total number of blocks.
    """
    if n < 0:
        raise InputError(f"out_features cannot be {n}")
    k, columns = x.shape[-1], n // halves
    # Each half is padded to whole blocks, so that its first feature begins a block.
    blocks = halves * ((columns + BLOCK - 1) // BLOCK)
    stored = PACKED_DTYPES[bits] if floats else PACKED_DTYPES[bits][:1]
    expected = (blocks, packed_words(k, bits), BLOCK, 2 if bits == _HALF else GROUP)
    if n % halves or w_packed.dtype not in stored or w_packed.shape != expected:
        raise InputError(
            f"w_packed {tuple(w_packed.shape)} does not fit n={n}, k={k}"
            f"{' in two halves' * (halves - 1)}"
        )
    return columns, blocks


def packed_words(k: int, bits: int) -> int:
    """Return the 32-bit words that ``k`` packed values of a feature fill."""
    # Whole groups of four values, since products read four at a time.
    if bits == _HALF:
        return (k + GROUP - 1) // GROUP * 2
    step = _WORD // bits
    return (k + step - 1) // step


def check_parameters(
    what: str, given: torch.Tensor, types: Collection[torch.dtype] | None, *shapes: tuple[int, ...]
) -> None:
    """Check dtype and shape of a weight's parameters; ``None`` accepts any float dtype."""
    wanted = "float" if types is None else " or ".join(map(str, types))
    fits = given.dtype.is_floating_point if types is None else given.dtype in types
    if not fits:
        raise InputError(f"{what} must be {wanted}, not {given.dtype}")
    if tuple(given.shape) not in shapes:
        expected = " or ".join(map(str, shapes))
        raise InputError(f"{what} {tuple(given.shape)} does not fit, expected {expected}")


def check_bias_size(bias: torch.Tensor | None, n: int) -> None:
    """Check that a bias has one float, or one per output feature."""
    if bias is None:
        return
    if not bias.dtype.is_floating_point:
        raise InputError(f"bias must be float, not {bias.dtype}")
    count = bias.numel()  # may be symbolic, which is not hashable
    if count != 1 and count != n:  # noqa: PLR1714
        raise InputError(f"bias has {count} elements, expected 1 or {n}")
