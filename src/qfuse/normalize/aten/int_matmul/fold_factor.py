"""Fold an 8-bit factor of a product that is computed from constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.dtypes import BYTES, COMPUTE_DTYPES
from qfuse.ir.graph.alias import leaves_graph
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.constants import is_constant_expression
from qfuse.ir.ops.views import dtype_of, has_values, shape_of
from qfuse.normalize.aten.int_matmul.products import FACTOR_STEPS
from qfuse.normalize.match.constants import derived, evaluated
from qfuse.normalize.match.quantized_values import moved_constant
from qfuse.rewrite.pattern import Step, V, match, through
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

_MATRIX = 2
_FACTOR = V("factor")


def _float(node: Node) -> Node | None:
    return cast_source(node) if dtype_of(node) in COMPUTE_DTYPES else None


_BEHIND_STEPS = through(
    _FACTOR, *FACTOR_STEPS, Step("cast to float", _float, (aten._to_copy.default,))
)


@dataclass(frozen=True, slots=True)
class ComputedFactor:
    """A factor, the constant that it comes from, and its value."""

    node: Node
    home: Node
    value: torch.Tensor


class FoldFactor(Rule[ComputedFactor]):
    """``_int_mm(x, t(select(w, 0, 1)))`` uses the selected matrix as a constant.

    So does a linear whose weight is a cast of such a matrix.

    Before::

        const w int8 [3, N, K] -> select(1) -> t -> _int_mm

    After::

        const w_factor int8 [N, K] -> t -> _int_mm

    Exact. A view shares the memory of the old constant; what is computed, such as a stack of
    matrices or unpacked nibbles, is computed once, at compile time.

    Refuses: factors that are constants already, that are computed at run time or at random, or
    that the caller gets; other factors than 8-bit matrices.
    """

    name = "fold-factor"
    anchors: ClassVar[tuple[OpOverload, ...]] = (
        aten._int_mm.default,
        aten.mm.default,
        aten.matmul.default,
        aten.linear.default,
    )
    exactness = Exactness.EXACT

    def match(self, node: Node) -> ComputedFactor | Miss:
        """Match a factor behind transposes, copies and casts to wider integers."""
        for operand in arguments(node).values():
            found = _computed(operand)
            if found is not None:
                return found
        return Miss(MissCode.NOT_CONSTANT, node, "no factor is computed from constants", progress=0)

    def rewrite(self, site: ComputedFactor, rw: Rewriter) -> None:
        """Replace the factor by a constant."""
        with rw.before(site.node):
            rw.replace(site.node, derived(rw, site.home, site.value, "factor"))


def _computed(operand: object) -> ComputedFactor | None:
    found = match(_BEHIND_STEPS, operand) if isinstance(operand, Node) else None
    if found is None or isinstance(found, Miss):
        return None
    node = found[_FACTOR]
    if node.op != "call_function" or dtype_of(node) not in BYTES:
        return None
    if len(shape_of(node)) != _MATRIX or leaves_graph(node) or not is_constant_expression(node):
        return None
    moved = moved_constant(node)
    if moved is not None:
        return ComputedFactor(node, *moved)
    value = evaluated(node)
    known = value is not None and has_values(value)
    return ComputedFactor(node, node, value) if known and value is not None else None
