"""Make one op of the product of a quantized linear's halves, where it stays float."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.movement.glu_halves import halves_of, uncast
from qfuse.ir.ops.activation import Activation
from qfuse.ir.ops.epilogue import Mul
from qfuse.ir.ops.linear import as_fused_linear
from qfuse.ir.ops.output import Output
from qfuse.ir.ops.views import tensor_of
from qfuse.ir.sizes import is_row_major
from qfuse.optimize.fuse.match_gated import Gated, gated
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule


@dataclass(frozen=True, slots=True)
class FuseGateSite:
    """A product of the halves of a linear, as the op that it becomes."""

    node: Node
    fused: Activation


class FuseGate(Rule[FuseGateSite]):
    """``act(g) * u`` of the halves of a fused linear becomes ``qfuse.activation``.

    Before::

        qfuse.linear -> split -+- g -> silu -.
                               |             +- mul -> reader
                               '- u ---------'

    After::

        qfuse.linear -> qfuse.activation -> reader

    Its result is float. A kernel of the linear may multiply the halves while they are in its
    registers. What is quantized behind the product is another rule's, which comes first.

    Refuses: factors that are no halves of one quantized linear; operands that broadcast; values on
    the way that others read; a linear that gives stored numbers; results in another order than
    rows.
    """

    name = "fuse-gate"
    anchors: ClassVar[tuple[OpOverload, ...]] = (torch.ops.aten.mul.Tensor,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> FuseGateSite | Miss:
        """Match a product of which one factor is an activation."""
        found = gated(node, node)
        if isinstance(found, Miss):
            return found
        whole = _whole(found)
        linear = None if whole is None else as_fused_linear(whole)
        if linear is None or linear.out_params is not None or not found.steps:
            text = "its factors are no halves of one quantized linear"
            return Miss(MissCode.PATTERN, node, text, progress=1)
        if not is_row_major(tensor_of(node)) or not is_row_major(tensor_of(linear.node)):
            text = "the product lies in memory in another order than rows"
            return Miss(MissCode.SHAPE, node, text, progress=3)
        own = (found.x, None, found.epilogue, found.extras, Output())
        return FuseGateSite(node, Activation(node, *own))

    def rewrite(self, site: FuseGateSite, rw: Rewriter) -> None:
        """Put the op where the product stood."""
        op = site.fused
        call = rw.replay(op.overload, op.call_args(), {}, [tensor_of(site.node)])
        rw.replace(site.node, rw.item(call, 0))


def _whole(found: Gated) -> Node | None:
    """Return the value whose two halves are multiplied, if that is what is computed."""
    for step in found.steps:
        if isinstance(step, Mul):
            halves = halves_of(found.x, uncast(found.extras[step.index])[1])
            return None if halves is None else halves.source
    # The step says that it multiplies halves, or there are none.
    return found.x
