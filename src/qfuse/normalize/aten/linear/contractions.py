"""The axes that an ``einsum`` or a ``tensordot`` of an activation and a weight contracts."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx.node import Argument

from qfuse.ir.ops.views import shape_of
from qfuse.rewrite.prelude import Miss, MissCode, Node

_MATRIX = 2


def contraction_rows(node: Node, x: Node, dims_x: Argument, dims_weight: Argument) -> bool | Miss:
    """Return whether the weight of a ``tensordot`` is ``[N, K]``; otherwise it is ``[K, N]``."""
    axis, of_weight = _only_axis(dims_x, len(shape_of(x))), _only_axis(dims_weight, _MATRIX)
    # Any other axis of the activation would need a transpose of run-time data.
    if axis is not None and axis == len(shape_of(x)) - 1 and of_weight is not None:
        return of_weight == 1
    text = "it contracts axes {} and {}, a linear the last one of its input"
    return Miss(MissCode.AXIS, node, text, dims_x, dims_weight)


def _only_axis(axes: Argument, rank: int) -> int | None:
    """Return the axis in a list of one, counted from the front."""
    if not isinstance(axes, (list, tuple)) or len(axes) != 1 or not isinstance(axes[0], int):
        return None
    return axes[0] % rank


def einsum_rows(of_x: int, of_weight: int) -> Callable[..., bool | Miss]:
    """Return a function that returns whether the weight of an ``einsum`` is ``[N, K]``.

    Args:
        of_x: The index of the activation's term.
        of_weight: The index of the weight's term.
    """

    def rows(node: Node, x: Node, equation: Argument) -> bool | Miss:
        terms, _, result = str(equation).replace(" ", "").partition("->")
        each = terms.split(",")
        found = _read_equation(each[of_x], each[of_weight], result, len(shape_of(x)))
        text = "{} is more than a product over the last axis"
        return Miss(MissCode.PATTERN, node, text, equation) if found is None else found

    return rows


def _read_equation(x: str, weight: str, result: str, rank: int) -> bool | None:
    """Return whether the weight is ``[N, K]``; ``None`` if the equation is not a linear."""
    lead, k = x[:-1], x[-1:]
    features = weight.replace(k, "", 1) if k else ""
    names = [*lead.replace("...", ""), k, features]
    plain = all(len(name) == 1 and name.isalpha() for name in names)
    whole = "..." in lead or len(x) == rank
    # A letter that repeats takes a diagonal; `bk,nk->nb` is a transposed linear, so the result has
    # to list the rows first.
    if plain and whole and len(set(names)) == len(names) and result == lead + features:
        return weight[1] == k
    return None
