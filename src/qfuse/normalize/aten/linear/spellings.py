"""Turn every spelling of a product with a weight into ``aten.linear``: one table row each."""

from __future__ import annotations

from abc import ABC

from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.view_ops import SIZED_VIEWS
from qfuse.ir.ops.views import dtype_of, node_of, shape_of
from qfuse.ir.sizes import same_shape, same_size
from qfuse.normalize.aten.linear.contractions import contraction_rows, einsum_rows
from qfuse.normalize.aten.linear.weights import call_linear, is_weight, transposed
from qfuse.normalize.match.constants import derived
from qfuse.rewrite.pattern import Arg, Capture, Either, Match, PatternRule, Read, V, op
from qfuse.rewrite.pattern.guards import bind, guard, let
from qfuse.rewrite.prelude import Exactness, MissCode, Node, Rewriter, arguments, aten

_MATRIX = 2
_RUN_TIME = MissCode.NOT_CONSTANT, "both factors are computed at run time"

X, BIAS, EQUATION = V("x"), V("bias"), Arg("equation")
BY_ROWS = Capture[bool]("by_rows")


def _weight(value: Node) -> Node | None:
    return value if is_weight(value) else None


def shared_matrix(batched: Node) -> Node | None:
    """Return the matrix that every batch entry of ``batched`` equals."""
    steps = (*SIZED_VIEWS, aten.unsqueeze.default, aten.expand.default, aten.clone.default)
    node, last = batched, shape_of(batched)[-_MATRIX:]
    while len(shape_of(node)) > _MATRIX:
        if not is_call(node, *steps):
            return None
        node = node_of(arguments(node)["self"])
        # A view that moves elements between the batch and the last two axes gives every batch entry
        # other rows.
        if not same_shape(shape_of(node)[-_MATRIX:], last):
            return None
    return node


# A product of two activations is not a near miss of a linear: the weight is the core.
WEIGHT = Read("weight", _weight).otherwise(*_RUN_TIME).core()
"""A weight ``[K, N]``."""

ROWS = WEIGHT.given(bind(BY_ROWS, True))
"""A weight ``[N, K]``."""


@guard(*_RUN_TIME, at="weight")
def _is_known(weight: Node) -> bool:
    return is_weight(weight)


SHARED = Read("weight", shared_matrix, "matrix of all batch entries").given(_is_known).core()
"""A weight ``[K, N]`` that all batch entries share."""


@guard(MissCode.SHAPE, "a summand of shape {bias.shape} is not one number per feature", at="bias")
def _is_bias(node: Node, bias: Node) -> bool:
    shape = shape_of(bias)
    # A summand of one element broadcasts, and `linear` takes only `[N]`.
    return bool(shape) and same_shape(shape, (*(1,) * (len(shape) - 1), shape_of(node)[-1]))


@guard(MissCode.DTYPE, "the bias is {bias.dtype}, the product {node.dtype}", at="bias")
def _has_type(node: Node, bias: Node) -> bool:
    return dtype_of(bias) == dtype_of(node)


@guard(MissCode.SHAPE, "an axis of one element is broadcast: {x.shape}, {weight.shape}")
def _contracts_all(x: Node, weight: Node, by_rows: bool | None) -> bool:
    # `inner` and `einsum` broadcast a contracted axis of 1, which sums the other factor.
    return same_size(shape_of(x)[-1], shape_of(weight)[1 if by_rows else 0])


@guard(MissCode.SHAPE, "a scalar has no axis to contract", at="x")
def _has_axes(x: Node) -> bool:
    return len(shape_of(x)) > 0


class LinearFrom(PatternRule, ABC):
    """A product of an activation ``x`` and a weight becomes ``linear(x, weight, bias)``.

    Before::

        w -> t --+
        x -------+-> mm

    After::

        w --+
        x --+-> linear

    The new call multiplies and sums the same numbers. Exact where ``linear`` makes the same library
    call; rounding where the library may sum in another order.

    Refuses: two factors that are computed at run time; a weight that is not a matrix, or not the
    same one for all batch entries; ``alpha`` or ``beta`` other than 1; a summand that is not one
    number per output feature; a contraction of anything but the last axis of the activation with
    one axis of the weight; an axis of one element that is broadcast to the other one.
    """

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Build the weight as ``[N, K]`` and the bias as ``[N]``."""
        weight, bias = site[WEIGHT], site.get(BIAS)
        weight = weight if site.get(BY_ROWS) else transposed(rw, weight)
        bias = None if bias is None else _flat(rw, bias)
        rw.replace(site.node, call_linear(rw, site[X], weight, bias))


def _flat(rw: Rewriter, bias: Node) -> Node:
    """Return ``bias`` of shape ``[N]`` or ``[1, .., N]`` as ``[N]``."""
    if len(shape_of(bias)) == 1:
        return bias
    value = constant_of(bias)
    if value is not None:
        return derived(rw, bias, value.reshape(-1), "flat")
    return rw.call(aten.view.default, bias, [-1])


_ROWS = (
    ("mm", Exactness.EXACT, op(aten.mm.default, X, WEIGHT)),
    (
        "addmm",
        Exactness.EXACT,
        op(aten.addmm.default, mat2=WEIGHT, mat1=X, self=BIAS).given(_is_bias, _has_type),
    ),
    (
        "matmul",
        Exactness.EXACT,
        Either(
            op(aten.matmul.default, other=V("x", rank=1), self=ROWS),
            op(aten.matmul.default, X, V("weight", rank=2).given(_is_known).core()),
        ),
    ),
    ("mv", Exactness.EXACT, op(aten.mv.default, ROWS, X)),
    # Batched products are other library calls than the one product of all rows.
    ("bmm", Exactness.ROUNDING, op(aten.bmm.default, X, SHARED)),
    (
        "baddbmm",
        Exactness.ROUNDING,
        op(aten.baddbmm.default, batch2=SHARED, batch1=X, self=BIAS).given(_is_bias, _has_type),
    ),
    (
        "inner",
        Exactness.ROUNDING,
        Either(
            op(aten.inner.default, X.given(_has_axes), ROWS),
            op(aten.tensordot.default, X, WEIGHT, Arg("dims_x"), Arg("dims_weight")).given(
                let(BY_ROWS, contraction_rows)
            ),
        ).given(_contracts_all),
    ),
    (
        "einsum",
        Exactness.ROUNDING,
        Either(
            op(aten.einsum.default, EQUATION, [X, WEIGHT]).given(let(BY_ROWS, einsum_rows(0, 1))),
            op(aten.einsum.default, EQUATION, [WEIGHT, X]).given(let(BY_ROWS, einsum_rows(1, 0))),
        ).given(_contracts_all),
    ),
)

LINEAR_FROM = {
    name: LinearFrom.row(f"linear-from-{name}", exactness, pattern)
    for name, exactness, pattern in _ROWS
}
"""The rules, by the op that they replace."""
