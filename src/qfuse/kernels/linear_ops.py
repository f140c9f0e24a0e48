"""The three ops of a linear of quantized activations: float, quantized, rowwise quantized."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from qfuse.ir.dtypes import BYTES, FLOATS
from qfuse.ir.errors import InputError
from qfuse.kernels.op import KernelOp
from qfuse.kernels.rowwise import RowwiseResult, fake_rowwise

_DEFAULTS: Mapping[str, object] = {
    "bias": None,
    "extras": (),
    "epilogue": "",
    "product_dtype": torch.float32,
}
_OUTPUT: Mapping[str, object] = {"reciprocal": True, "zero_point_first": False}


def linear_ops(
    name: str, columns: Callable[[Any], int], defaults: Mapping[str, object] | None = None
) -> tuple[KernelOp[torch.Tensor], KernelOp[torch.Tensor], KernelOp[RowwiseResult]]:
    """Return ``name``, ``name_quantized`` and ``name_rows``.

    Args:
        name: The op with a float result.
        columns: Returns the number of output features from the arguments, or raises InputError.
        defaults: Defaults in addition to those that all of the ops share.
    """
    known = {**_DEFAULTS, **(defaults or {})}

    def result(a: Any, dtype: torch.dtype, possible: Collection[torch.dtype]) -> torch.Tensor:
        if a.product_dtype not in FLOATS:
            raise InputError(f"product_dtype must be one of {FLOATS}, not {a.product_dtype}")
        if dtype not in possible:
            raise InputError(f"the result must be one of {possible}, not {dtype}")
        # Contiguous whatever the strides of `x` are, as the kernel makes it.
        made: torch.Tensor = a.x.new_empty((*a.x.shape[:-1], columns(a)), dtype=dtype)
        return made

    def rows(a: Any) -> RowwiseResult:
        return fake_rowwise(a, result(a, a.float_dtype, FLOATS), a.float_dtype, a.float_dtype)

    return (
        KernelOp(
            name,
            lambda a: result(a, a.out_dtype, FLOATS),
            defaults=known,
            like={"out_dtype": "product_dtype"},
        ),
        KernelOp(
            f"{name}_quantized",
            lambda a: result(a, a.out_dtype, BYTES),
            defaults={**known, **_OUTPUT},
        ),
        KernelOp(f"{name}_rows", rows, defaults=known, like={"float_dtype": "product_dtype"}),
    )
