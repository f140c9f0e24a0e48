"""Make regions around quantized convolutions channels-last where that saves copies."""

from __future__ import annotations

from collections.abc import Mapping

from qfuse.ir.graph.stage_graph import SITE_META, site_of
from qfuse.lower.layout.channels_last import ChannelsLastSearch, copies_of_convolutions
from qfuse.lower.layout.shuffles import Shuffle, find_shuffles
from qfuse.lower.problems.span import CONVOLUTION
from qfuse.lower.select.context import LoweringContext
from qfuse.rewrite.prelude import Exactness, Node, Rewriter
from qfuse.rewrite.regions import Region, RegionRewrite, RegionSearch, copy_seconds

NAME = "channels-last"
"""The name of the rewrites."""


def assign_channels_last(context: LoweringContext) -> None:
    """Rewrite every region that is predicted to be faster as channels-last.

    Values that leave a region keep their strides.
    """
    covering = (k for k in context.kernels if CONVOLUTION in k.covers)
    if all(kernel.supported(context.target) is not None for kernel in covering):
        return
    shuffles = find_shuffles(context.program.graph.nodes)
    search = ChannelsLastSearch(context.session.editor.infer, shuffles)
    for region in search.regions(context.program):
        if region.can_be_left and _pays(region, context):
            first = next(iter(region.nodes))
            edit = _Assignment(region, search, shuffles).apply
            context.session.rewrite(NAME, first, edit, proof=Exactness.ROUNDING)


def _pays(region: Region, context: LoweringContext) -> bool:
    """Whether the copies at the border take less time than those that convolutions would make."""
    border = copy_seconds(region.copies, context.cost, context.symbols)
    convolutions = copies_of_convolutions(region)
    return border < copy_seconds(convolutions, context.cost, context.symbols)


class _Assignment(RegionRewrite):
    """Rewrites one region."""

    def __init__(
        self, region: Region, search: RegionSearch, shuffles: Mapping[Node, Shuffle]
    ) -> None:
        super().__init__(region, search)
        self._shuffles = shuffles

    def made_again(self, node: Node, rw: Rewriter) -> Node:
        """Make the same call, or shuffle the channels of adjacent pixels."""
        shuffle = self._shuffles.get(node)
        made = super().made_again(node, rw) if shuffle is None else shuffle.emit(rw)
        # Events about the node were logged before, and its kernel is selected after.
        made.meta[SITE_META] = site_of(node)
        return made
