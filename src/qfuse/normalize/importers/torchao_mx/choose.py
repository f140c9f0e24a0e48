"""The block scales of torchao's ``to_mx``, in exported ATen ops."""

from __future__ import annotations

import torch

from qfuse.ir.ops import library as ops
from qfuse.ir.ops.views import shape_of
from qfuse.normalize.importers.torchao_mx.patterns import BLOCKS, choose_spec, exponents
from qfuse.rewrite.pattern import Match, PatternRule, op
from qfuse.rewrite.prelude import Exactness, Rewriter, aten

_E8M0 = torch.float8_e8m0fnu


class NormalizeMxChoose(PatternRule):
    """The exponents of the largest magnitudes become a ``qfuse.choose_qparams``.

    Before::

        x -> view in blocks -> abs -> amax -> ... -> where(isnan, 255) -> view as float8_e8m0fnu

    After::

        x -> qfuse.choose_qparams -> unsqueeze

    Refuses: the code of another torchao version; rounding to even, which torch cannot export.
    """

    name = "normalize-mx-choose"
    exactness = Exactness.EXACT
    pattern = op(aten.view.dtype, exponents(), _E8M0).giving(_E8M0)

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Add the canonical op."""
        blocks = site[BLOCKS]
        scale = rw.item(rw.call(ops.choose_qparams, blocks.x, str(choose_spec(blocks))), 0)
        # The view in blocks became part of the spec, so the scales lack the axis of the block.
        if len(shape_of(scale)) < len(shape_of(site.node)):
            scale = rw.call(aten.unsqueeze.default, scale, -1)
        rw.replace(site.node, scale)
