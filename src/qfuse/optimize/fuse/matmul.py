"""Fuse ``matmul(dequantize(x), dequantize(other))`` into one op on quantized values."""

from __future__ import annotations

from typing import ClassVar

from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.epilogue import Epilogue
from qfuse.ir.ops.matmul import MATMULS, FusedMatmul, as_matmul
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import shape_of, tensor_of
from qfuse.ir.sizes import is_row_major
from qfuse.optimize.fuse.epilogue import replace_by
from qfuse.optimize.match.float_side import refuse_float_side
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule

_MATRIX = 2


class FuseMatmul(Rule[FusedMatmul]):
    """Fuse the dequantizes of both operands of a product into it.

    Before::

        q -> dequantize --.
        k -> dequantize --+-> aten.matmul

    After::

        q, k -> qfuse.matmul

    Both operands are computed at run time, as queries and keys are. Their parameters may have any
    granularity. A transposed operand is a view, which the op reads with its strides. A shared
    dequantize stays for its other users.

    Refuses: one float operand; a constant operand, which is the weight of a linear where that is
    possible; an operand of one axis; batch axes that are not known to broadcast; a result that is
    not contiguous.
    """

    name = "fuse-matmul"
    anchors: ClassVar[tuple[OpOverload, ...]] = MATMULS
    exactness = Exactness.EXACT

    def match(self, node: Node) -> FusedMatmul | Miss:
        """Match a product of two dequantizes."""
        product = as_matmul(node)
        assert product is not None, "the anchor is a product"
        operands = {"left": product.x, "right": product.other}
        found = {side: as_dequantize(operand) for side, operand in operands.items()}
        x, other = found["left"], found["right"]
        if x is None and other is None:
            return Miss(MissCode.PATTERN, node, "no operand is quantized", progress=0)
        for side, operand in operands.items():
            quantized = found[side]
            if quantized is None:
                rest = product.other if side == "left" else product.x
                return refuse_float_side(side, operand, rest)
            if constant_of(quantized.q) is not None:
                text = "the {} operand is a constant, this op multiplies two activations"
                return Miss(MissCode.PATTERN, quantized.q, text, side, progress=2)
        assert x is not None, "both are quantized"
        assert other is not None, "both are quantized"
        fused = FusedMatmul(node, x.q, x.params, other.q, other.params, None, Epilogue(), ())
        return _refuse_shapes(fused) or fused

    def rewrite(self, site: FusedMatmul, rw: Rewriter) -> None:
        """Replace the product; dequantizes without other users are erased."""
        replace_by(site, site.node, rw)


def _refuse_shapes(fused: FusedMatmul) -> Miss | None:
    x, other = tuple(shape_of(fused.x)), tuple(shape_of(fused.other))
    if min(len(x), len(other)) < _MATRIX:
        text = "a product of shapes {} and {} has an operand of one axis"
    elif fused.batch is None:
        text = "the batch axes of {} and {} are not known to broadcast"
    elif not is_row_major(tensor_of(fused.node)):
        text = "the result of shapes {} and {} is not contiguous"
    else:
        return None
    return Miss(MissCode.SHAPE, fused.node, text, x, other, progress=3)
