"""Make regions around quantized convolutions channels-last where that saves copies."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx.node import map_arg

from qfuse.cost import WorkRange, pointwise_work, size_range
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.graph.stage_graph import SITE_META, site_of
from qfuse.ir.memory_formats import channels_last_of, format_of
from qfuse.ir.ops.views import result_of, tensor_of
from qfuse.lower.layout.regions import Region, find_regions
from qfuse.lower.problems.span import CONVOLUTION
from qfuse.lower.select.context import LoweringContext
from qfuse.rewrite.prelude import Exactness, Node, Rewriter

NAME = "channels-last"
"""The name of the rewrites."""


def assign_channels_last(context: LoweringContext) -> None:
    """Rewrite every region that is predicted to be faster as channels-last.

    Values that leave a region keep their strides.
    """
    covering = (k for k in context.kernels if CONVOLUTION in k.covers)
    if all(kernel.supported(context.target) is not None for kernel in covering):
        return
    for region in find_regions(context.program, context.session.editor.infer):
        if _pays(region, context):
            first = next(iter(region.nodes))
            edit = _Assignment(region).apply
            context.session.rewrite(NAME, first, edit, proof=Exactness.ROUNDING)


def _pays(region: Region, context: LoweringContext) -> bool:
    """Whether the copies at the border take less time than those that convolutions would make."""
    return _seconds(region.copies, context) < _seconds(region.copies_of_convolutions, context)


def _seconds(copied: Iterable[Node], context: LoweringContext) -> float:
    """Predict the time of copying values."""
    plan: list[WorkRange] = []
    for node in copied:
        value = tensor_of(node)
        bits = value.element_size() * 8
        plan.append(pointwise_work(size_range(value.numel(), context.symbols), [bits], [bits]))
    return context.cost.seconds(plan) if plan else 0.0


class _Assignment:
    """Rewrites one region."""

    def __init__(self, region: Region) -> None:
        self._region = region
        # Copies of the values that enter, by value.
        self._copies: dict[Node, Node] = {}

    def apply(self, rw: Rewriter) -> None:
        """Repeat every node on channels-last operands, and copy the values that leave."""
        for node, leaving in self._region.nodes.items():
            with rw.instead_of(node):
                self._repeat(node, leaving, rw)

    def _repeat(self, node: Node, leaving: list[Node], rw: Rewriter) -> None:
        shuffle = self._region.shuffles.get(node)
        made = self._again(node, rw) if shuffle is None else shuffle.emit(rw)
        # Events about the node were logged before, and its kernel is selected after.
        made.meta[SITE_META] = site_of(node)
        if leaving:
            stays = [user for user in node.users if user not in leaving]
            before = format_of(tensor_of(node))
            restored = rw.call(torch.ops.aten.clone.default, made, memory_format=before)
            rw.replace(node, restored, but=stays)
        rw.replace(node, made)

    def _again(self, node: Node, rw: Rewriter) -> Node:
        """Make the same call of the new operands."""
        entering = {entry: self._copy(entry, rw) for entry in self._region.entries[node]}
        args, kwargs = map_arg((node.args, node.kwargs), lambda o: entering.get(o, o))
        op, item = overload_of(node), result_of(node)
        if op is not None:
            return rw.call(op, *args, **kwargs)
        assert item is not None, "the only other call"
        return rw.item(*item)

    def _copy(self, entry: Node, rw: Rewriter) -> Node:
        if entry not in self._copies:
            last = channels_last_of(tensor_of(entry).dim())
            self._copies[entry] = rw.call(torch.ops.aten.clone.default, entry, memory_format=last)
        return self._copies[entry]
