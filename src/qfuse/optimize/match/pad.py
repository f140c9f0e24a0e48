"""``constant_pad_nd``, with the axes that it pads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx.node import Argument

from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.ops.views import node_of, shape_of, tensor_of
from qfuse.ir.quant.block import covers
from qfuse.ir.quant.spec import Block
from qfuse.ir.sizes import is_row_major
from qfuse.rewrite.prelude import Miss, MissCode, Node, Rewriter, arguments, aten


@dataclass(frozen=True, slots=True)
class Pad:
    """A padding with one finite number.

    Attributes:
        node: The op.
        x: What is padded.
        pads: Elements before and after, from the last axis on; negative ones cut off.
        value: The number.
    """

    node: Node
    x: Node
    pads: Sequence[Argument]
    value: float

    def result(self, x: torch.Tensor) -> torch.Tensor | Miss:
        """Return the type of the padding of another tensor of the same shape.

        Padding a fake tensor takes its symbolic sizes for numbers, so where there are any the type
        is put together from what is there already.
        """
        if all(isinstance(size, int) for size in x.shape):
            with torch.no_grad():
                made: torch.Tensor = aten.constant_pad_nd.default(x, list(self.pads), 0)
            return made
        old = tensor_of(self.node)
        if all(map(is_row_major, (x, tensor_of(self.x), old))):
            return torch.empty_like(old, dtype=x.dtype)
        text = "{} pads a tensor of unknown size that does not lie in row-major order"
        return Miss(MissCode.SHAPE, self.node, text, op_name(self.node), progress=2)

    def again(self, rw: Rewriter, x: Node, value: int) -> Node:
        """Pad another value, for which :meth:`result` has an answer, with another number."""
        made = self.result(tensor_of(x))
        assert isinstance(made, torch.Tensor), "a padding of unknown type is refused"
        args = (x, list(self.pads), value)
        return rw.replay(aten.constant_pad_nd.default, args, {}, made)

    def split_axis(self, block: Block) -> int | None:
        """Return an axis that is padded and has several blocks, before or after."""
        rank = len(block)
        for index, count in enumerate(self.pads):
            axis = rank - 1 - index // 2
            sizes = shape_of(self.x)[axis], shape_of(self.node)[axis]
            if count != 0 and not all(covers(block[axis], size) for size in sizes):
                return axis
        return None


def as_pad(value: object) -> Pad | None:
    """View ``value`` as a padding with a finite number, or ``None``."""
    if not is_call(value, aten.constant_pad_nd.default):
        return None
    node = node_of(value)  # type: ignore[arg-type]
    a = arguments(node)
    pads, number = a["pad"], a["value"]
    assert isinstance(pads, (list, tuple)), f"not a list of sizes: {node.format_node()}"
    plain = isinstance(number, (int, float)) and not isinstance(number, bool)
    if not plain or not math.isfinite(number):  # type: ignore[arg-type]
        return None
    return Pad(node, node_of(a["self"]), pads, float(number))  # type: ignore[arg-type]
