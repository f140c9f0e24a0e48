"""Shared code of the rules that extend the epilogue of a fused product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.ops.epilogue import EpilogueOp
from qfuse.ir.ops.product import FusedProduct, as_fused_product, kind_of
from qfuse.ir.ops.views import tensor_of
from qfuse.rewrite.prelude import Miss, MissCode, Node, Rewriter


def open_product(value: object, user: Node, *also: Node) -> FusedProduct | Miss:
    """View ``value`` as a fused product that can absorb ``user``.

    Args:
        value: The operand.
        user: The node that computes the epilogue op.
        also: Users of the value that are part of the epilogue op.

    Refuses: anything else; an op with other users, which need its value unchanged; an op whose
    output is already quantized, since no epilogue op follows the quantization.
    """
    fused = as_fused_product(value)
    if fused is None:
        text = "the operand is not a quantized linear, convolution or matmul"
        return Miss(MissCode.PATTERN, user, text, progress=0)
    others = sorted({op_name(u) for u in fused.node.users if u not in {user, *also}})
    if others:
        text = "the {}'s own result is also used by {}"
        return Miss(
            MissCode.SHARED, fused.node, text, kind_of(fused), ", ".join(others), progress=2
        )
    if fused.out_params is not None:
        text = "the {}'s output is already quantized"
        return Miss(MissCode.ORDER, fused.node, text, kind_of(fused), progress=2)
    return fused


def append_op(
    fused: FusedProduct, user: Node, step: EpilogueOp, rw: Rewriter, extras: Sequence[Node] = ()
) -> None:
    """Replace ``user`` by ``fused`` with one more epilogue op.

    Args:
        fused: The op.
        user: The node that computes the step.
        step: The epilogue op.
        rw: Edits the graph.
        extras: The operands that are appended to those of the epilogue.
    """
    replace_by(extended(fused, step, extras), user, rw)


def extended(fused: FusedProduct, step: EpilogueOp, extras: Sequence[Node] = ()) -> FusedProduct:
    """Return ``fused`` with one more epilogue op, whose operands are appended to the others."""
    return replace(fused, epilogue=fused.epilogue.then(step), extras=(*fused.extras, *extras))


def replace_by(fused: FusedProduct, old: Node, rw: Rewriter) -> None:
    """Replace ``old`` by a fused op of the same type.

    The type is copied: inferring it would run the reference, which takes as long as the rest of
    the rewrite.
    """
    rw.replace(old, rw.replay(fused.overload, fused.call_args(), {}, tensor_of(old)))
