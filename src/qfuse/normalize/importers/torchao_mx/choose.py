"""The block scales of torchao's ``to_mx``, chosen op by op."""

from __future__ import annotations

from typing import ClassVar

import torch

from qfuse.ir.ops import library as ops
from qfuse.ir.ops.views import shape_of
from qfuse.normalize.importers.torchao_mx.patterns import MxBlocks, choose_spec, read_codes
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    arguments,
)


class NormalizeMxChoose(Rule[tuple["Node", MxBlocks]]):
    """The exponents of the greatest magnitudes become a ``qfuse.choose_qparams``.

    Before::

        x -> view in blocks -> abs -> amax -> ... -> where(isnan, 255) -> view as float8_e8m0fnu

    After::

        x -> qfuse.choose_qparams -> unsqueeze

    Refuses: a spelling of another version; rounding to even, which torch cannot export.
    """

    name = "normalize-mx-choose"
    anchors: ClassVar[tuple[OpOverload, ...]] = (torch.ops.aten.view.dtype,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> tuple[Node, MxBlocks] | Miss:
        """Match exponents that are viewed as scales."""
        a = arguments(node)
        if a["dtype"] is not torch.float8_e8m0fnu:
            return Miss(MissCode.PATTERN, node, "it is no scale of blocks", progress=0)
        blocks = read_codes(a["self"])
        if blocks is None:
            text = "a scale of blocks is chosen in a way that qfuse does not know"
            return Miss(MissCode.PATTERN, node, text, progress=1)
        return node, blocks

    def rewrite(self, site: tuple[Node, MxBlocks], rw: Rewriter) -> None:
        """Choose canonically."""
        node, blocks = site
        scale = rw.item(rw.call(ops.choose_qparams, blocks.x, str(choose_spec(blocks))), 0)
        if len(shape_of(scale)) < len(shape_of(node)):
            scale = rw.call(torch.ops.aten.unsqueeze.default, scale, -1)
        rw.replace(node, scale)
