"""Fuse the dequantize of a norm's input into the norm where its result stays float."""

from __future__ import annotations

from typing import ClassVar

from qfuse.ir.ops.output import Output
from qfuse.ir.ops.views import tensor_of
from qfuse.ir.sizes import is_row_major
from qfuse.optimize.fuse.norm import fused_norm, refuse_shared
from qfuse.optimize.fuse.operands import stored_edge
from qfuse.patterns.norm import A_NORM, NORM, Norm
from qfuse.rewrite.pattern import match
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    aten,
)


def _refuse_part(node: Node) -> Miss | None:
    """Refuse a norm that a weight, a bias or a cast continues."""
    for user in node.users:
        longer = match(A_NORM, user)
        if not isinstance(longer, Miss) and node in longer[NORM].inner:
            return Miss(MissCode.PATTERN, node, "it is a part of a norm", progress=0)
    return None


class FuseStoredNorm(Rule[Norm]):
    """``norm(dequantize(q))`` with a float result becomes one op, in all spellings of norms.

    Before::

        q -> dequantize -> layer_norm -> user

    After::

        q -> qfuse.layer_norm -> user

    A norm whose result is quantized is left to ``fuse-norm-quantize``, which runs first.

    Refuses: an input that is float; a norm whose spelling no spec describes; a part of the norm
    with other users; values that are not row-major.
    """

    name = "fuse-stored-norm"
    # The ops that a norm may end with.
    anchors: ClassVar[tuple[OpOverload, ...]] = (
        aten.layer_norm.default,
        aten.rms_norm.default,
        aten.mul.Tensor,
        aten.div.Tensor,
        aten.add.Tensor,
        aten._to_copy.default,
        aten.type_as.default,
    )
    exactness = Exactness.EXACT

    def match(self, node: Node) -> Norm | Miss:
        """Match a whole norm of a dequantize."""
        found = match(A_NORM, node)
        norm = None if isinstance(found, Miss) else found[NORM]
        # Why a norm does not match is told where its result is quantized.
        if norm is None or stored_edge(norm.x)[1] is None:
            return Miss(MissCode.PATTERN, node, "it is not a norm of a dequantize", progress=0)
        refusal = _refuse_part(node) or refuse_shared(norm)
        if refusal is not None:
            return refusal
        if not is_row_major(tensor_of(node)) or not is_row_major(tensor_of(norm.x)):
            return Miss(MissCode.SHAPE, node, "the norm is not row-major")
        return norm

    def rewrite(self, site: Norm, rw: Rewriter) -> None:
        """Insert the op in place of the norm."""
        fused = fused_norm(site, site.node, None, Output())
        call = rw.replay(fused.overload, fused.call_args(), {}, [tensor_of(site.node)])
        rw.replace(site.node, rw.item(call, 0))
