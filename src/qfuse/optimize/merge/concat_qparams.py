"""Concatenate weights along their output axis: scales, zero points and biases.

No value is requantized: parameters that differ between parts are repeated to a block size that all
parts have in common.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch

from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.views import QuantParams, bits_equal
from qfuse.ir.quant.spec import Block
from qfuse.rewrite.prelude import Node, Rewriter

WeightPart = tuple[QuantParams, tuple[int, ...]]
"""The parameters of a weight, and its shape: ``(n, k)``, or more axes after the first."""

MatrixBlock = tuple[int | None, int | None]

_MATRIX = 2


def concat_params(parts: Sequence[WeightPart], name: str, rw: Rewriter) -> QuantParams:
    """Concatenate the parameters of weights along the output axis.

    The parts agree in storage, formats, compute dtype, domain and float dtype, and in whether there
    is a second level of scales; dequantize uses no other field of a spec. Weights of more than two
    axes also agree in their blocks after the first axis. The new range covers all ranges.

    Args:
        parts: The constant parameters of each weight.
        name: The prefix of the new constants' names.
        rw: Adds them.
    """
    shapes = [shape for _, shape in parts]
    blocks = [params.spec.block for params, _ in parts]
    scales = [_tensor(params.scale) for params, _ in parts]
    zeros = _zero_points([params.zero_point for params, _ in parts], scales)
    joined = _joined(blocks, shapes, [scales, *([] if zeros is None else [zeros])])
    low = min(params.spec.quant_min for params, _ in parts)
    high = max(params.spec.quant_max for params, _ in parts)
    spec = replace(parts[0][0].spec, quant_min=low, quant_max=high, block=joined.block, outer=None)
    scale = rw.constant(joined.values[0], f"{name}_scale")
    zero = None if zeros is None else rw.constant(joined.values[1], f"{name}_zero_point")
    seconds = [_tensor(p.outer_scale) for p, _ in parts if p.outer_scale is not None]
    if not seconds:
        return QuantParams(spec, scale, zero)
    outers = [params.spec.outer for params, _ in parts if params.spec.outer is not None]
    level = _joined(outers, shapes, [seconds])
    outer = rw.constant(level.values[0], f"{name}_outer_scale")
    return QuantParams(replace(spec, outer=level.block), scale, zero, outer)


@dataclass(frozen=True, slots=True)
class _Level:
    """Concatenated parameters with blocks of one size."""

    block: Block
    values: tuple[torch.Tensor, ...]


def _joined(
    given: Sequence[Block],
    shapes: Sequence[tuple[int, ...]],
    kinds: Sequence[Sequence[torch.Tensor]],
) -> _Level:
    """Concatenate parameters of every kind, in blocks that fit all parts.

    Blocks after the first axis agree if there are more than two axes: these count as one whole
    axis.
    """
    # Axes after the first agree, so one column stands for all of them.
    many = len(given[0]) > _MATRIX
    blocks: list[MatrixBlock] = [(block[0], None if many else block[1]) for block in given]
    sizes = [(shape[0], math.prod(shape[1:])) for shape in shapes]
    groups = [columns or k for (_, columns), (_, k) in zip(blocks, sizes, strict=True)]
    # The largest block that divides the blocks of all parts, so that each scale can be repeated.
    group = reduce(math.gcd, groups)
    whole = all(columns is None for _, columns in blocks)
    # Scales and zero points have one grid, so they need rows of the same size.
    rows = _common_rows(blocks, sizes, kinds)

    def join(values: Sequence[torch.Tensor]) -> torch.Tensor:
        flat = [value.flatten(1) for value in values]
        if rows is None:
            made = _spread_columns(flat[0], groups[0], group, sizes[0][1])
        else:
            spread = []
            for value, (high, _), wide, (n, k) in zip(flat, blocks, groups, sizes, strict=True):
                tall = _spread_rows(value, high, rows, n)
                spread.append(_spread_columns(tall, wide, group, k))
            # Zero points of int8 and int32 are exact in int32.
            dtype = reduce(torch.promote_types, (v.dtype for v in spread))
            made = torch.cat([v.to(dtype) for v in spread])
        return made.reshape(made.shape[0], *values[0].shape[1:]) if many else made

    behind = given[0][1:] if many else (None if whole else group,)
    return _Level((rows, *behind), tuple(map(join, kinds)))


def concat_bias(parts: Sequence[tuple[Node | None, int]], rw: Rewriter) -> Node | None:
    """Return the biases concatenated; a missing one is -0.0, which changes no sum.

    Args:
        parts: The constant bias of each linear, if it has one, and its output features.
        rw: Adds the constant.
    """
    given = [bias for bias, _ in parts if bias is not None]
    if not given:
        return None
    like = _tensor(given[0])
    # +0.0 would turn a result of -0.0 into +0.0.
    values = [like.new_full((n,), -0.0) if bias is None else _tensor(bias) for bias, n in parts]
    return rw.constant(torch.cat(values), "_".join(str(bias.target) for bias in given))


def _common_rows(
    blocks: Sequence[MatrixBlock],
    sizes: Sequence[tuple[int, ...]],
    kinds: Sequence[Sequence[torch.Tensor]],
) -> int | None:
    """Return the block size along the output axis that fits all parts."""
    high = [rows for rows, _ in blocks]
    # One scale for all rows stays one if all parts agree.
    same = all(_same(values[0], value) for values in kinds for value in values)
    columns = {columns for _, columns in blocks}
    if same and len(columns) == 1 and all(b is None for b in high):
        return None
    block = high[0]
    # All parts but the last must end at a block boundary.
    if block is not None and set(high) == {block} and all(n % block == 0 for n, _ in sizes[:-1]):
        return block
    # One scale per row fits every part, since the rows of a block can repeat its scale.
    return 1


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bits_equal(a, b)


def _spread_rows(value: torch.Tensor, block: int | None, rows: int, n: int) -> torch.Tensor:
    if block == rows:
        return value
    # The last block may be cut off by the end of the axis.
    return value.repeat_interleave(block or n, 0)[:n]


def _spread_columns(value: torch.Tensor, block: int, group: int, k: int) -> torch.Tensor:
    if block == group:
        return value
    # The last block may be partial, so the repeated scales may be too many.
    return value.repeat_interleave(block // group, 1)[:, : -(-k // group)]


def _zero_points(
    nodes: Sequence[Node | None], scales: Sequence[torch.Tensor]
) -> list[torch.Tensor] | None:
    """Return the zero points; where only some parts have one, a missing one is zero."""
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
