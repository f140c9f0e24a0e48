"""Permute the input of a linear instead of the input features of its weight."""

from __future__ import annotations

import torch

from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.views import shape_of
from qfuse.normalize.aten.linear.weights import call_linear, transposed
from qfuse.normalize.match.constants import derived
from qfuse.normalize.match.views import transpose_source
from qfuse.rewrite.pattern import (
    Arg,
    Capture,
    Either,
    Match,
    PatternRule,
    Step,
    V,
    Via,
    bind,
    guard,
    let,
    op,
)
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rewriter, aten

X, WEIGHT, ORDER, BIAS = V("x"), V("weight", rank=2), V("order"), Arg("bias")
TURNED = Capture[bool]("turned")
BACK = Capture[torch.Tensor]("back")
_TRANSPOSE = Step("transpose", transpose_source)


def _back(weight: Node, order: Node, axis: object, turned: bool | None) -> torch.Tensor | Miss:
    """Return the inverse of the permutation of the input features."""
    rank, features = 2, 0 if turned else 1
    if not isinstance(axis, int) or axis % rank != features:
        return Miss(MissCode.AXIS, weight, "the output features are permuted")
    known = constant_value(order)
    if known is None:
        return Miss(MissCode.NOT_CONSTANT, order, "the order is computed at run time")
    back = torch.argsort(known)
    # Indices that repeat or leave out features are not a permutation.
    whole = torch.arange(int(shape_of(weight)[features]))
    if not torch.equal(known[back], whole):
        return Miss(MissCode.ARGUMENT, order, "it is not a permutation of the input features")
    return back


@guard(MissCode.SHAPE, "the input has no axis of features", at="x")
def _has_features(x: Node) -> bool:
    return len(shape_of(x)) > 0


_SELECT = op(aten.index_select.default, WEIGHT, Arg("axis"), ORDER).core()


class PermuteFeatures(PatternRule):
    """``linear(x, w[:, order])`` becomes ``linear(x[..., inverse of order], w)``.

    Before::

        w -> dequantize -> index_select(1, order) --+
        x ------------------------------------------+-> linear

    After::

        w -> dequantize ------------------------------+
        x -> index_select(-1, inverse of the order) --+-> linear

    The weight stays quantized in groups of neighbouring features, as kernels read it.

    Rounding: the same products are summed in another order.

    Refuses: permuted output features; indices that are not a permutation, or are computed at run
    time.
    """

    name = "permute-features"
    exactness = Exactness.ROUNDING
    pattern = op(
        aten.linear.default,
        X,
        Either(Via(_SELECT, _TRANSPOSE).given(bind(TURNED, True)), _SELECT),
        BIAS,
    ).given(let(BACK, _back), _has_features)

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Select from the input."""
        order = derived(rw, site[ORDER], site[BACK], "inverse")
        axis = len(shape_of(site[X])) - 1
        x = rw.call(aten.index_select.default, site[X], axis, order)
        weight = transposed(rw, site[WEIGHT]) if site.get(TURNED) else site[WEIGHT]
        bias = site[BIAS]
        bias = bias if isinstance(bias, Node) else None
        rw.replace(site.node, call_linear(rw, x, weight, bias, like=site.node))
