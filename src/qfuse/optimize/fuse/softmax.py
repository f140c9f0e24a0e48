"""Fuse a softmax with its mask, the dequantize of its input, and the quantize of its result."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.ops.output import ExtraOutput
from qfuse.ir.ops.softmax import Softmax, SoftmaxSpec
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.sizes import same_shape
from qfuse.optimize.fuse.operands import stored_edge
from qfuse.optimize.fuse.quantized_output import (
    ExtraValue,
    FuseQuantizeSite,
    QuantizedResult,
    fuse_site,
    quantized,
)
from qfuse.patterns.casts import FLOAT_CAST
from qfuse.rewrite.pattern import (
    ANY,
    Arg,
    Capture,
    Either,
    Literal,
    Match,
    Maybe,
    PatternRule,
    V,
    Via,
    let,
    op,
)
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rewriter, arguments, aten

_SITE = Capture[FuseQuantizeSite]("site")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
X, AXIS, CALL = V("x", _FLOATS), Arg("axis"), Capture[Node]("call")

SOFTMAX_CALL = (
    Either(
        op(aten.softmax.int, X, AXIS, ANY),
        op(aten._softmax.default, X, AXIS, Literal(value=False)),
    )
    .core()
    .named(CALL.label)
)
"""A softmax without the cast after it."""

_SOFTMAX = Maybe(Via(SOFTMAX_CALL, FLOAT_CAST), SOFTMAX_CALL)


@dataclass(frozen=True, slots=True)
class MaskedInput:
    """The input of a softmax before its mask, if it has one.

    Attributes:
        x: The scores.
        mask: What is added to them, or bools.
        fill: What replaces the elements that the bools select.
    """

    x: Node
    mask: Node | None = None
    fill: float | None = None


def masked_input(x: Node, user: Node) -> MaskedInput:
    """View an input as scores and a mask, if the masked scores have no other users."""
    if list(x.users) != [user] or not is_call(x, aten.add.Tensor, aten.masked_fill.Scalar):
        return MaskedInput(x)
    a = arguments(x)
    scores, mask = a["self"], a.get("mask", a.get("other"))
    if is_call(x, aten.add.Tensor) and isinstance(mask, Node) and isinstance(scores, Node):
        # The mask is what broadcasts, on either side.
        if not same_shape(shape_of(scores), shape_of(x)):
            scores, mask = mask, scores
        plain = a["alpha"] == 1 and dtype_of(mask).is_floating_point
        fits = same_shape(shape_of(scores), shape_of(x)) and dtype_of(scores).is_floating_point
        return MaskedInput(scores, mask) if plain and fits else MaskedInput(x)
    fill = a.get("value")
    known = isinstance(fill, (int, float)) and not isinstance(fill, bool)
    if not isinstance(scores, Node) or not isinstance(mask, Node) or not known:
        return MaskedInput(x)
    fits = same_shape(shape_of(scores), shape_of(x)) and dtype_of(mask) is torch.bool
    return MaskedInput(scores, mask, float(fill)) if fits else MaskedInput(x)  # type: ignore[arg-type]


def _site(match: Match, x: Node, call: Node, result: QuantizedResult) -> FuseQuantizeSite | Miss:
    axis, y = match[AXIS], result.quantize.x
    if not isinstance(axis, int):
        return Miss(MissCode.ARGUMENT, call, "its axis is {}", axis)
    others = sorted({op_name(user) for user in call.users if call is not y and user is not y})
    if others:
        text = "its result before the cast is also used by {}"
        return Miss(MissCode.SHARED, call, text, ", ".join(others))
    own = ExtraValue(ExtraOutput.FLOAT, y, frozenset(result.ends))
    kept = (own,) if own.users else ()
    output = result.block(frozenset(k.what for k in kept))
    found = masked_input(x, call)
    spec = SoftmaxSpec(axis, dtype_of(call), dtype_of(y), found.fill)
    edge = stored_edge(found.x)
    fused = Softmax(result.quantize.node, *edge, found.mask, spec, output)
    return fuse_site(fused, result, kept)


class FuseSoftmaxQuantize(PatternRule):
    """``quantize(softmax(dequantize(q) + mask))`` becomes ``qfuse.softmax``.

    Before::

        q -> dequantize -> add(mask) -> softmax -> cast -> quantize

    After::

        q, mask -> qfuse.softmax -> quantized values

    The mask is added, or its bools select what is filled with a number; it may broadcast. If the
    float result has other users, the op returns it as an extra output.

    Refuses: a result before a cast with other users; parameters that are computed from the result
    otherwise than by a choice for it; operands that are computed only after the first user of the
    op's results; strides that would change. Masked scores with other users stay outside.
    """

    name = "fuse-softmax-quantize"
    exactness = Exactness.EXACT
    pattern = quantized(_SOFTMAX).given(let(_SITE, _site))

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Insert the op in front of the first user of its results."""
        site[_SITE].insert(rw)
