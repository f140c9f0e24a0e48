"""Fuse ``convolution(dequantize(x), dequantize(w), b)`` into one op on quantized values."""

from __future__ import annotations

from typing import ClassVar

from qfuse.ir.ops.convolution import CONVOLUTIONS, Convolution, FusedConvolution, as_convolution
from qfuse.ir.ops.epilogue import Epilogue
from qfuse.optimize.fuse.epilogue import replace_by
from qfuse.optimize.fuse.operands import Operands, quantized_operands
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule


class FuseConvolution(Rule[FusedConvolution]):
    """Fuse the dequantizes of a convolution's operands into it.

    Before::

        q -> dequantize --.
        w -> dequantize --+-> aten.conv2d

    After::

        q, w -> qfuse.convolution

    This covers every spelling of a convolution, with any granularity of its parameters. A shared
    dequantize stays for its other users. An activation that is not quantized stays a float operand:
    the result is a weight-only convolution.

    Refuses: a float weight, also one of one entry per output; a weight that is not a constant;
    settings that are computed at run time; a padding that differs on the two sides of an axis,
    which normalizing expands.
    """

    name = "fuse-convolution"
    anchors: ClassVar[tuple[OpOverload, ...]] = CONVOLUTIONS
    exactness = Exactness.EXACT

    def match(self, node: Node) -> FusedConvolution | Miss:
        """Match a convolution with a dequantized constant weight."""
        conv = as_convolution(node)
        assert conv is not None, "the anchor is a convolution"
        operands = quantized_operands(conv.x, conv.weight, transposed=conv.transposed)
        if isinstance(operands, Miss):
            return operands
        if not conv.is_static:
            text = "its settings are computed at run time"
            return Miss(MissCode.ARGUMENT, node, text, progress=3)
        if isinstance(conv.padding, str):
            text = 'the padding "{}" differs on the two sides of an axis'
            return Miss(MissCode.ARGUMENT, node, text, conv.padding, progress=3)
        return _fused(conv, operands, conv.padding)

    def rewrite(self, site: FusedConvolution, rw: Rewriter) -> None:
        """Replace the convolution; dequantizes without other users are erased."""
        replace_by(site, site.node, rw)


def _fused(conv: Convolution, operands: Operands, padding: tuple[int, ...]) -> FusedConvolution:
    groups = conv.groups
    assert isinstance(groups, int), "the settings are static"
    return FusedConvolution(
        conv.node,
        operands.x,
        operands.x_params,
        operands.weight.q,
        operands.weight.params,
        conv.bias,
        conv.per_axis("stride"),
        padding,
        conv.per_axis("dilation"),
        conv.transposed,
        conv.per_axis("output_padding") if conv.transposed else (0,) * conv.spatial,
        groups,
        None,
        Epilogue(),
        (),
    )
