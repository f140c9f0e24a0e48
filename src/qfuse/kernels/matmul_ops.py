"""Products of two activations, and their fakes.

``attention`` computes what torch's ``scaled_dot_product_attention`` does without dropout:
``softmax(query @ key.mT * scale + mask) @ value``. Sums, scores and the result of the softmax are
float32.

===========  =====================================================================================
``query``    float32, bfloat16 or float16 ``[batch, heads, rows, features]``, any strides, as the
             two that follow
``key``      of the same dtype ``[batch, shared, keys, features]``; every ``heads / shared``
             adjacent heads of queries have the same keys
``value``    of the same dtype ``[batch, shared, keys, width]``
``mask``     ``None``, float32 or the same dtype, which is added, or bool, false where a key is left
             out; broadcasts to ``[batch, heads, rows, keys]``
``causal``   whether row ``i`` has the first ``i + 1`` keys only; then there is no mask
``scale``    positive and at most 2^127, also in float32
``order``    the axes of the result but the last one, from the outermost in memory: 0 is the batch,
             1 heads, 2 rows
===========  =====================================================================================

A row without keys is 0 if all values are finite: what is masked has the weight 0, also with
``causal``, and may be multiplied by it. By default the result is a transposed contiguous
``[batch, rows, heads, width]``. It depends neither on the number of threads
nor, where multiply-adds are rounded once, on the instruction set. In bfloat16 with at least 16 rows
it does: AVX512-BF16 and AMX have instructions for its products, which round weights to bfloat16 as
torch does, add in orders of their own and take subnormal values as 0. Otherwise products of
bfloat16 and float16 are float32, and only the result is rounded.

``matmul_a8a8`` and ``matmul_a8a8_quantized`` compute on quantized values what ``torch.matmul``
computes on floats. With ``x`` of shape ``[*batch, M, K]`` and ``other`` ``[*batch, K, N]``, whose
batch axes broadcast:

1. ``total = sum over k of (x - x_zero_point) * (other - other_zero_point)``, exact: in int32 for K
   up to 65536, or 32768 if ``other`` is uint8 or has a zero point, and in int64 for larger K.
2. ``y = float32(total) * x_scale * other_scale``, from left to right in float32 without fused
   multiply-add, then rounded to ``product_dtype``, and the epilogue ops and the result as in
   :mod:`qfuse.kernels.ops`. The epilogue has no GLU.

The right operand is packed in each call: before the product, or where there are at least as many
batch entries as threads, by the thread that multiplies an entry. Results do not depend on the
number of threads, on strides or on the instruction set. The ops do not mutate their
arguments, which may be the same tensor. The result is contiguous.

====================  ============================================================================
``x``                 int8 or uint8, at least two axes, any strides. Rows with adjacent elements are
                      read in place, others are copied
``x_scale``           one float, or a tensor that broadcasts to ``[*batch, M, 1]``
``x_zero_point``      ``None``, one integer, or one that broadcasts likewise; in the range of ``x``
``other``             int8 or uint8, at least two axes, any strides: a transposed view is not copied
``other_scale``       one float, or a tensor that broadcasts to ``[*batch, 1, N]``, with the batch
                      axes of ``other``
``other_zero_point``  ``None``, one integer, or one that broadcasts likewise
``extras``            at most 4 tensors, as in :mod:`qfuse.kernels.ops`, that broadcast to the
                      result
====================  ============================================================================

``epilogue``, ``product_dtype``, ``out_dtype`` and the arguments of a quantized result are those of
:mod:`qfuse.kernels.ops`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from ctypes import c_float
from typing import Any

import torch

from qfuse.ir.dtypes import BYTES, FLOATS
from qfuse.ir.errors import InputError
from qfuse.ir.sizes import Size, broadcast_shape
from qfuse.kernels.op import KernelOp

GREATEST_SCALE = 2.0**127
"""Of attention's scores: times the logarithm of e to the base 2, it is finite in float32."""

_MATRIX = 2
_ATTENTION_AXES = 4

_DEFAULTS: Mapping[str, object] = {
    "x_zero_point": None,
    "other_zero_point": None,
    "extras": (),
    "epilogue": "",
    "product_dtype": torch.float32,
}
_OUTPUT: Mapping[str, object] = {"reciprocal": True, "zero_point_first": False}


def _result(a: Any, possible: Collection[torch.dtype]) -> torch.Tensor:
    if a.product_dtype not in FLOATS:
        raise InputError(f"product_dtype must be one of {FLOATS}, not {a.product_dtype}")
    if a.out_dtype not in possible:
        raise InputError(f"the result must be one of {possible}, not {a.out_dtype}")
    for name, operand in (("x", a.x), ("other", a.other)):
        if operand.dtype not in BYTES:
            raise InputError(f"{name} must be int8 or uint8, not {operand.dtype}")
        if operand.dim() < _MATRIX:
            raise InputError(f"{name} must have at least two axes, not {operand.dim()}")
    lead = broadcast_shape(a.x.shape[:-_MATRIX], a.other.shape[:-_MATRIX])
    if lead is None:
        shapes = tuple(a.x.shape), tuple(a.other.shape)
        raise InputError(f"the batch axes of {shapes[0]} and {shapes[1]} do not broadcast")
    made: torch.Tensor = a.x.new_empty(
        (*lead, a.x.shape[-_MATRIX], a.other.shape[-1]), dtype=a.out_dtype
    )
    return made


def mask_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return the dtypes that a mask may have, for queries of ``dtype``."""
    return (torch.bool, torch.float32, dtype)


def _attention(a: Any) -> torch.Tensor:
    dtype = a.query.dtype
    if dtype not in FLOATS:
        raise InputError(f"query must be one of {FLOATS}, not {dtype}")
    for name in ("query", "key", "value"):
        x = getattr(a, name)
        if x.dtype is not dtype or x.dim() != _ATTENTION_AXES:
            raise InputError(
                f"{name} must be {dtype} [batch, heads, rows, features], not {x.dtype} "
                f"{tuple(x.shape)}"
            )
    query, key, value = (tuple(x.shape) for x in (a.query, a.key, a.value))
    pairs = ((query[0], key[0]), (query[3], key[3]), *zip(key[:3], value[:3], strict=True))
    if any(_differ(one, other) for one, other in pairs):
        raise InputError(f"query, key and value do not fit: {query}, {key}, {value}")
    if isinstance(query[1], int) and isinstance(key[1], int) and query[1] % max(key[1], 1):
        raise InputError(f"{query[1]} heads of queries are not a multiple of {key[1]} of keys")
    if not 0 < c_float(a.scale).value <= GREATEST_SCALE:
        raise InputError(f"the scale must be positive and at most 2^127, not {a.scale}")
    if a.mask is not None:
        _check_mask(a.mask, (*query[:3], key[2]), dtype, causal=a.causal)
    if sorted(a.order) != [0, 1, 2]:
        raise InputError(
            f"the order of the result's axes must be a permutation of 0, 1 and 2, not {a.order}"
        )
    out: torch.Tensor = a.query.new_empty((*(query[axis] for axis in a.order), value[3]))
    return out.permute(*(a.order.index(axis) for axis in range(3)), 3)


def _check_mask(
    mask: torch.Tensor, scores: Sequence[Size], dtype: torch.dtype, *, causal: bool
) -> None:
    if causal:
        raise InputError("a causal attention takes no mask")
    if mask.dtype not in mask_dtypes(dtype):
        raise InputError(
            f"the mask must be bool, float32 or of the queries' dtype, not {mask.dtype}"
        )
    shape = tuple(mask.shape)
    if not _MATRIX <= len(shape) <= _ATTENTION_AXES:
        raise InputError(f"the mask must have two to four axes: {shape}")
    sizes = zip(shape, scores[-len(shape) :], strict=True)
    if any(_differ(size, 1) and _differ(size, other) for size, other in sizes):
        raise InputError(f"the mask {shape} does not broadcast to the scores {tuple(scores)}")


def _differ(one: Size, other: Size) -> bool:
    """Whether two sizes certainly differ."""
    return isinstance(one, int) and isinstance(other, int) and one != other


attention: KernelOp[torch.Tensor] = KernelOp(
    "attention", _attention, defaults={"mask": None, "causal": False, "order": (0, 2, 1)}
)
matmul_a8a8: KernelOp[torch.Tensor] = KernelOp(
    "matmul_a8a8",
    lambda a: _result(a, FLOATS),
    defaults=_DEFAULTS,
    like={"out_dtype": "product_dtype"},
)
matmul_a8a8_quantized: KernelOp[torch.Tensor] = KernelOp(
    "matmul_a8a8_quantized",
    lambda a: _result(a, BYTES),
    defaults={**_DEFAULTS, **_OUTPUT},
)
