"""Shared code of the rules that extend a fused linear's epilogue."""

from __future__ import annotations

from dataclasses import replace

from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.ops.epilogue import Step
from qfuse.ir.ops.linear import FusedLinear, as_fused_linear
from qfuse.ir.ops.views import tensor_of
from qfuse.rewrite.prelude import Miss, MissCode, Node, Rewriter


def open_linear(value: object, user: Node) -> FusedLinear | Miss:
    """View ``value`` as a fused linear that can absorb ``user``.

    Refuses: anything else; a linear with other users, which need its value unchanged; a linear
    whose output is already quantized, since no epilogue op follows the quantization.
    """
    fused = as_fused_linear(value)
    if fused is None:
        return Miss(MissCode.PATTERN, user, "the operand is not a quantized linear", progress=0)
    others = sorted({op_name(u) for u in fused.node.users if u is not user})
    if others:
        text = "the linear's own result is also used by {}"
        return Miss(MissCode.SHARED, fused.node, text, ", ".join(others), progress=2)
    if fused.out_params is not None:
        text = "the linear's output is already quantized"
        return Miss(MissCode.ORDER, fused.node, text, progress=2)
    return fused


def append_step(
    fused: FusedLinear, user: Node, step: Step, rw: Rewriter, extra: Node | None = None
) -> None:
    """Replace ``user`` by ``fused`` with one more epilogue op."""
    extras = fused.extras if extra is None else (*fused.extras, extra)
    grown = replace(fused, epilogue=fused.epilogue.then(step), extras=extras)
    replace_by(grown, user, rw)


def replace_by(fused: FusedLinear, old: Node, rw: Rewriter) -> None:
    """Replace ``old`` by a fused linear of the same type.

    The type is copied: inferring it would run the reference, which takes as long as the rest of
    the rewrite.
    """
    rw.replace(old, rw.replay(fused.overload, fused.call_args(), {}, tensor_of(old)))
