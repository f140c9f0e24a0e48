"""Quantized weights that are concatenated or stacked after their scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.constants import constant_params
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.ir.ops.views import QuantParams, has_values, shape_of
from qfuse.ir.quant.block import covers
from qfuse.ir.quant.spec import QuantSpec
from qfuse.normalize.match.constants import derived
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    arguments,
    aten,
)


@dataclass(frozen=True, slots=True)
class JoinedWeights:
    """A concatenation or a stack of dequantized constants.

    Attributes:
        node: The concatenation or the stack.
        home: The constant of the first part.
        rows: The parts.
        axis: The axis along which they are joined.
        spec: How all values are dequantized.
    """

    node: Node
    home: Node
    rows: tuple[_Rows, ...]
    axis: int
    spec: QuantSpec


class MergeWeights(Rule[JoinedWeights]):
    """``cat([dequantize(w), dequantize(v)])`` of constants becomes ``dequantize(cat([w, v]))``.

    Before::

        const w, s -> qfuse.dequantize --.
        const v, t -> qfuse.dequantize --+-> cat

    After::

        const [w, v], const [s, t] -> qfuse.dequantize

    The weights of queries, keys and values that are multiplied at once. A scale of a whole part is
    repeated for its rows. Along other axes than the first all parts have the same scales.

    The weights of experts may be stacked, each with its own scales, along any axis.

    Exact: each value is dequantized as before.

    Refuses: parts that are computed at run time, have other users, or differ in dtype, range or
    blocks; scales of two levels; scales that differ where they are not joined.
    """

    name = "merge-weights"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.cat.default, aten.stack.default)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> JoinedWeights | Miss:
        """Match a concatenation or a stack of dequantized constants of any sizes."""
        a = arguments(node)
        tensors = a["tensors"]
        assert isinstance(tensors, (list, tuple)), "operands are a list"
        found = [as_dequantize(part) for part in tensors if isinstance(part, Node)]
        parts = [part for part in found if part is not None and _is_held(part)]
        if not parts or len(parts) < len(found):
            text = "it does not join dequantized weights"
            return Miss(MissCode.PATTERN, node, text, progress=0)
        # They would be in memory twice.
        shared = next((part for part in parts if len(part.node.users) > 1), None)
        if shared is not None:
            text = "{} is used by other ops too"
            return Miss(MissCode.SHARED, shared.node, text, shared.node.name)
        axis = a["dim"]
        assert isinstance(axis, int), "an axis is a number"
        axis %= len(shape_of(node))
        joined = _joined(parts, axis, stacked=is_call(node, aten.stack.default))
        if joined is None:
            text = "the joined weights are quantized in different ways"
            return Miss(MissCode.GRANULARITY, node, text, progress=2)
        rows, spec = joined
        return JoinedWeights(node, parts[0].q, rows, axis, spec)

    def rewrite(self, site: JoinedWeights, rw: Rewriter) -> None:
        """Join the constants, and dequantize them at once."""
        home, rows, axis = site.home, site.rows, site.axis
        q = derived(rw, home, torch.cat([row.q for row in rows], axis), "joined")
        # Where one block covers the axis, all parts have the same parameters.
        joined = rows[:1] if site.spec.block[axis] is None else rows
        scale = derived(rw, home, torch.cat([row.scale for row in joined], axis), "scale")
        zero = None
        if any(row.zero_point is not None for row in joined):
            zeros = torch.cat([_zeros_of(row) for row in joined], axis)
            zero = derived(rw, home, zeros, "zero_point")
        params = QuantParams(site.spec, scale, zero, None)
        rw.replace(site.node, rw.call(ops.dequantize, *params.call_args(q)))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Quantized values with parameters for each entry of the joined axis, or for all of them."""

    q: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    spec: QuantSpec

    def equals(self, other: _Rows) -> bool:
        """Whether the parameters are the same bit by bit."""
        zeros = _zeros_of(self), _zeros_of(other)
        return torch.equal(self.scale, other.scale) and torch.equal(*zeros)


def _joined(
    parts: Sequence[Dequantize], axis: int, *, stacked: bool
) -> tuple[tuple[_Rows, ...], QuantSpec] | None:
    """Return the parts, and how all are dequantized at once; ``None`` if they differ."""
    found = [_rows_of(part, axis, stacked=stacked) for part in parts]
    rows = tuple(row for row in found if row is not None)
    if len(rows) < len(parts) or len({row.spec for row in rows}) > 1:
        return None
    spec = rows[0].spec
    shared = spec.block[axis] is None
    return None if shared and not all(row.equals(rows[0]) for row in rows) else (rows, spec)


def _is_held(part: Dequantize) -> bool:
    """Whether a weight and its parameters are constants."""
    q = constant_of(part.q)
    return q is not None and has_values(q) and constant_params(part.params) is not None


def _rows_of(part: Dequantize, axis: int, *, stacked: bool) -> _Rows | None:
    """Return a weight with the axis along which it is joined, and its parameters.

    They are those of each entry of the first axis, and of each part of a stack. ``None`` if one
    block lies in several parts.
    """
    q, known, spec = constant_of(part.q), constant_params(part.params), part.params.spec
    if q is None or known is None or not spec.is_plain:
        return None
    scale, zero = known
    if stacked:
        q, scale = q.unsqueeze(axis), scale.unsqueeze(axis)
        zero = None if zero is None else zero.unsqueeze(axis)
        block = (*spec.block[:axis], 1, *spec.block[axis:])
        return _Rows(q, scale, zero, spec.with_block(block))
    return _of_concatenation(_Rows(q, scale, zero, spec), axis)


def _of_concatenation(part: _Rows, axis: int) -> _Rows | None:
    q, spec = part.q, part.spec
    block = spec.block[axis]
    if axis != 0:
        return part if block is None else None
    if block != 1 and not covers(block, q.shape[0]):
        return None
    zero = None if part.zero_point is None else _spread(part.zero_point, q)
    return _Rows(q, _spread(part.scale, q), zero, spec.with_block((1, *spec.block[1:])))


def _spread(value: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return value.expand(q.shape[0], *value.shape[1:])


def _zeros_of(row: _Rows) -> torch.Tensor:
    if row.zero_point is not None:
        return row.zero_point
    return torch.zeros(row.scale.shape, dtype=torch.int32)
