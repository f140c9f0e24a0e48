"""Fuse the dequantize of a softmax's input into the softmax where its result stays float."""

from __future__ import annotations

from qfuse.ir.ops.output import Output
from qfuse.ir.ops.softmax import Softmax, SoftmaxSpec
from qfuse.ir.ops.views import dtype_of, tensor_of
from qfuse.ir.sizes import is_row_major
from qfuse.optimize.fuse.operands import stored_edge
from qfuse.optimize.fuse.softmax import AXIS, SOFTMAX_CALL, masked_input
from qfuse.rewrite.pattern import Capture, Match, PatternRule, let
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rewriter

_FUSED = Capture[Softmax]("fused")


def _fused(match: Match, node: Node, x: Node) -> Softmax | Miss:
    axis, found = match[AXIS], masked_input(x, node)
    scores, params = stored_edge(found.x)
    if params is None:
        return Miss(MissCode.PATTERN, node, "its input is not a dequantize", progress=0)
    if not isinstance(axis, int):
        return Miss(MissCode.ARGUMENT, node, "its axis is {}", axis)
    if not is_row_major(tensor_of(node)) or not is_row_major(tensor_of(found.x)):
        return Miss(MissCode.SHAPE, node, "the softmax is not row-major")
    spec = SoftmaxSpec(axis, dtype_of(node), dtype_of(node), found.fill)
    return Softmax(node, scores, params, found.mask, spec, Output())


class FuseStoredSoftmax(PatternRule):
    """``softmax(dequantize(q) + mask)`` with a float result becomes one op.

    Before::

        q -> dequantize -> add(mask) -> softmax -> user

    After::

        q, mask -> qfuse.softmax -> user

    A softmax whose result is quantized is left to ``fuse-softmax-quantize``, which runs first.

    Refuses: an input that is float; an axis that is not a number; values that are not row-major.
    """

    name = "fuse-stored-softmax"
    exactness = Exactness.EXACT
    pattern = SOFTMAX_CALL.given(let(_FUSED, _fused))

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Insert the op in place of the softmax."""
        fused = site[_FUSED]
        call = rw.replay(fused.overload, fused.call_args(), {}, [tensor_of(site.node)])
        rw.replace(site.node, rw.item(call, 0))
