"""Store the integers of a weight in 8 bits if they fit, however wide their dtype is."""

from __future__ import annotations

import torch

from qfuse.ir.dtypes import COMPUTE_DTYPES
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.constants import is_constant_expression
from qfuse.ir.ops.views import dtype_of, has_values, shape_of
from qfuse.normalize.aten.qdq.expanded_scale import ExpandedScale, read_expanded
from qfuse.normalize.match.constants import derived, evaluated
from qfuse.rewrite.pattern import (
    Arg,
    Capture,
    Either,
    Match,
    Operand,
    PatternRule,
    Read,
    guard,
    let,
    op,
)
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rewriter, aten

_WIDE = (torch.bool, torch.int16, torch.int32, torch.int64)
_MATRIX = 2


def _integers(node: Node) -> Node | None:
    """Return a constant matrix of integers that are wider than 8 bits, or of bools."""
    is_wide = dtype_of(node) in _WIDE and len(shape_of(node)) >= _MATRIX
    return node if is_wide and is_constant_expression(node) else None


INTEGERS = Read("integers", _integers, "constant matrix of wide integers")
FACTOR = Operand("factor")
NARROW = Capture[torch.Tensor]("narrow")


@guard(MissCode.SHARED, "the integers have other users, so they would be stored twice", "integers")
def _is_single_use(integers: Node) -> bool:
    return len(integers.users) == 1


@guard(MissCode.PATTERN, "its zero points and scales are read together")
def _is_read_alone(node: Node, integers: Node) -> bool:
    # A difference of zero points has a wider range than the values.
    if not is_call(integers, aten.sub.Tensor) or len(node.users) != 1:
        return True
    return not isinstance(read_expanded(next(iter(node.users))), ExpandedScale)


def _narrow(integers: Node) -> torch.Tensor | Miss:
    held = constant_of(integers)
    value = evaluated(integers) if held is None else held
    if value is None or not has_values(value) or not value.numel():
        return Miss(MissCode.NO_VALUES, integers, "its values are not known")
    low, high = int(value.min()), int(value.max())
    for dtype in (torch.int8, torch.uint8):
        info = torch.iinfo(dtype)
        if info.min <= low and high <= info.max:
            return value.to(dtype)
    text = "the weight holds integers from {} to {}, which do not fit in 8 bits"
    return Miss(MissCode.RANGE, integers, text, low, high)


class NarrowIntegers(PatternRule):
    """``cast(w)`` to float of constant wide integers becomes ``cast(w')`` of 8-bit integers.

    Before::

        const w int64 -> cast float32

    After::

        const w' int8 -> cast float32

    The cast may be the implicit one of a product with floats. The integers may be computed, as
    those that are unpacked from nibbles by shifts and masks.

    Exact: 8-bit integers are exact in every float dtype, as the wide ones of the same value are.

    Refuses: values beyond 8 bits, or that are not known; integers with other users.
    """

    name = "narrow-integers"
    exactness = Exactness.EXACT
    pattern = Either(
        op(aten._to_copy.default, INTEGERS.core(), dtype=Arg("dtype")).giving(*COMPUTE_DTYPES),
        op(aten.mul.Tensor, INTEGERS.core(), FACTOR).giving(*COMPUTE_DTYPES),
    ).given(_is_single_use, _is_read_alone, let(NARROW, _narrow))

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Cast the narrow constant instead."""
        narrow = derived(rw, site[INTEGERS], site[NARROW], "narrow")
        real = rw.call(aten._to_copy.default, narrow, dtype=dtype_of(site.node))
        if is_call(site.node, aten.mul.Tensor):
            # The operands of a product are cast to the type of its result.
            real = rw.call(aten.mul.Tensor, real, site[FACTOR])
        rw.replace(site.node, real)
