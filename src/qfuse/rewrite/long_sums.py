"""How far a long sum of float32 products is from the truth if they are added one after another.

Sums in two orders have rounding errors of equal size as long as the signs of the terms are random.
If all terms have one sign, the partial sums grow, every addition rounds at their size, and may
round in the same direction each time: a kernel that adds in sequence is then much farther from the
truth than a library that adds in blocks, and neither is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from qfuse.ir.aten import aten
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.ops.linear import FusedLinear
from qfuse.ir.ops.matmul import FusedMatmul
from qfuse.rewrite.prelude import OpOverload
from qfuse.rewrite.tolerance import LONG_SUM

# Elements of the result whose sums are computed: some rows with some columns.
_ROWS = _COLUMNS = 8
_CHUNK = 1 << 12


@dataclass(frozen=True, slots=True)
class _Product:
    """Where the operands of a product are, and whether the right one is stored ``[N, K]``."""

    x: int
    other: int
    transposed: bool = False


_PRODUCTS: Mapping[OpOverload, _Product] = {
    aten.linear.default: _Product(0, 1, transposed=True),
    aten.mm.default: _Product(0, 1),
    aten.bmm.default: _Product(0, 1),
    aten.matmul.default: _Product(0, 1),
    aten.addmm.default: _Product(1, 2),
    aten.baddbmm.default: _Product(1, 2),
}
_FUSED: Mapping[OpOverload, tuple[type[FusedLinear | FusedMatmul], bool]] = {
    FusedLinear.overload: (FusedLinear, True),
    FusedMatmul.overload: (FusedMatmul, False),
}


def has_sums(node: Node) -> bool:
    """Whether ``node`` is a product of matrices."""
    op = overload_of(node)
    return op in _PRODUCTS or op in _FUSED


def call_with_sum_error(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a product in float64, too large by the error of sequential float32 sums.

    Args:
        node: A call for which :func:`has_sums` holds.
        args: Its arguments in float64.
        kwargs: The other ones.
    """
    op = overload_of(node)
    assert op is not None, "a product is a call"
    if op in _FUSED:
        declared, transposed = _FUSED[op]
        return declared.compute(_with_error(declared.reference, transposed), *args, **kwargs)
    where = _PRODUCTS[op]
    if max(where.x, where.other) >= len(args):
        return op(*args, **kwargs)
    given = list(args)
    error = sum_error(given[where.x], given[where.other], transposed=where.transposed)
    given[where.x] = given[where.x] * (1 + error)
    return op(*given, **kwargs)


def _with_error(reference: Callable[..., Any], transposed: bool) -> Callable[..., Any]:
    def compute(x: torch.Tensor, other: torch.Tensor, *rest: Any) -> Any:
        return reference(x * (1 + sum_error(x, other, transposed=transposed)), other, *rest)

    return compute


def sum_error(x: torch.Tensor, other: torch.Tensor, *, transposed: bool) -> float:
    """Return the relative error of sequential float32 sums, measured on some of them.

    Args:
        x: ``[..., M, K]``, or a vector.
        other: ``[..., K, N]``, or ``[..., N, K]`` if it is ``transposed``.
        transposed: Whether ``K`` is the last axis of ``other``.

    Returns:
        0 for short sums, and at most the limit of the table of tolerances.
    """
    length = x.shape[-1]
    if length < LONG_SUM.terms or not x.numel() or not other.numel():
        return 0.0
    columns = other if transposed or other.dim() == 1 else other.transpose(-1, -2)
    left, right = _some(x, length, _ROWS).float(), _some(columns, length, _COLUMNS).float()
    total = torch.zeros(len(left) * len(right))
    truth = total.double()
    for start in range(0, length, _CHUNK):
        part = slice(start, start + _CHUNK)
        terms = (left[:, None, part] * right[None, :, part]).flatten(0, 1).t().contiguous()
        truth += terms.double().sum(0)
        for term in terms.unbind(0):
            total += term
    size = float(truth.square().mean().sqrt())
    error = float((total.double() - truth).square().mean().sqrt())
    return min(error / size, LONG_SUM.most) if size > 0 and error < float("inf") else 0.0


def _some(matrix: torch.Tensor, length: int, count: int) -> torch.Tensor:
    """Return up to ``count`` rows at equal distances."""
    rows = matrix.reshape(-1, length)
    return rows[:: max(1, -(-len(rows) // count))]
