"""Concatenate weights along their output axis: scales, zero points and biases.

No number is quantized anew: what differs between parts is spread, by repeating it, to a block that
all of them have in common.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING

import torch

from qfuse.ir.program import constant_of
from qfuse.ir.views import QuantParams, bits_equal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Node

    from qfuse.rewrite.rewriter import Rewriter

__all__ = ["concat_bias", "concat_params"]

Part = tuple[QuantParams, tuple[int, ...]]
"""The parameters of a weight, and its shape ``(n, k)``."""


def concat_params(parts: Sequence[Part], name: str, rw: Rewriter) -> QuantParams:
    """Return the parameters of the weights one below the other.

    The parts agree in storage, compute type, domain and float type; dequantize reads nothing else
    of a spec. Ranges unite.

    Args:
        parts: The constant parameters of each weight.
        name: What the new constants are named after.
        rw: Adds them.
    """
    scales = [_tensor(params.scale) for params, _ in parts]
    zeros = _zero_points([params.zero_point for params, _ in parts], scales)
    groups = [params.spec.block[1] or k for params, (_, k) in parts]
    group = reduce(math.gcd, groups)
    whole = all(params.spec.block[1] is None for params, _ in parts)
    rows = _common_rows(parts, scales, zeros)
    spec = replace(
        parts[0][0].spec,
        quant_min=min(params.spec.quant_min for params, _ in parts),
        quant_max=max(params.spec.quant_max for params, _ in parts),
        block=(rows, None if whole else group),
    )

    def join(values: Sequence[torch.Tensor]) -> torch.Tensor:
        if rows is None:
            return _spread_columns(values[0], groups[0], group, parts[0][1][1])
        spread = []
        for value, (params, (n, k)) in zip(values, parts, strict=True):
            tall = _spread_rows(value, params.spec.block[0], rows, n)
            spread.append(_spread_columns(tall, params.spec.block[1] or k, group, k))
        dtype = reduce(torch.promote_types, (v.dtype for v in spread))
        return torch.cat([v.to(dtype) for v in spread])

    scale = rw.constant(join(scales), f"{name}_scale")
    zero = None if zeros is None else rw.constant(join(zeros), f"{name}_zero_point")
    return QuantParams(spec, scale, zero)


def concat_bias(parts: Sequence[tuple[Node | None, int]], rw: Rewriter) -> Node | None:
    """Return the biases one after the other; a missing one is -0.0, which changes no sum.

    Args:
        parts: The constant bias of each linear, if it has one, and its output features.
        rw: Adds the constant.
    """
    given = [bias for bias, _ in parts if bias is not None]
    if not given:
        return None
    like = _tensor(given[0])
    values = [like.new_full((n,), -0.0) if bias is None else _tensor(bias) for bias, n in parts]
    return rw.constant(torch.cat(values), "_".join(str(bias.target) for bias in given))


def _common_rows(
    parts: Sequence[Part], scales: Sequence[torch.Tensor], zeros: Sequence[torch.Tensor] | None
) -> int | None:
    """Return the block along the output axis that all parts can be given."""
    blocks = [params.spec.block[0] for params, _ in parts]
    same = all(_same(scales[0], v) for v in scales)
    same = same and (zeros is None or all(_same(zeros[0], v) for v in zeros))
    columns = {params.spec.block[1] for params, _ in parts}
    if same and len(columns) == 1 and all(b is None for b in blocks):
        return None
    block = blocks[0]
    if block is not None and set(blocks) == {block}:
        inner = parts[:-1]
        if all(n % block == 0 for _, (n, _) in inner):
            return block
    return 1


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bits_equal(a, b)


def _spread_rows(value: torch.Tensor, block: int | None, rows: int, n: int) -> torch.Tensor:
    if block == rows:
        return value
    return value.repeat_interleave(block or n, 0)[:n]


def _spread_columns(value: torch.Tensor, block: int, group: int, k: int) -> torch.Tensor:
    if block == group:
        return value
    return value.repeat_interleave(block // group, 1)[:, : -(-k // group)]


def _zero_points(
    nodes: Sequence[Node | None], scales: Sequence[torch.Tensor]
) -> list[torch.Tensor] | None:
    """Return the zero points; beside one that there is, a missing one is zero."""
    given = [_tensor(node) for node in nodes if node is not None]
    if not given:
        return None
    dtype = reduce(torch.promote_types, (value.dtype for value in given))
    return [
        scale.new_zeros(scale.shape, dtype=dtype) if node is None else _tensor(node).to(dtype)
        for node, scale in zip(nodes, scales, strict=True)
    ]


def _tensor(node: Node) -> torch.Tensor:
    value = constant_of(node)
    assert value is not None, f"{node} is not a constant"
    return value
