"""Split stored numbers, and dequantize the parts."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.graph.alias import leaves_graph
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.movement.registry import SPLITS, movement_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.ir.ops.views import tensor_of
from qfuse.optimize.match.move_qparams import Step, moved_params, same_strides
from qfuse.optimize.propagate.sink_dequantize import sink_step
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


@dataclass(frozen=True, slots=True)
class SinkBelowSplitSite:
    """A split, the dequantize that it reads, and how the parameters move to every part."""

    node: Node
    dequantize: Dequantize
    parts: tuple[Step, ...]


class SinkBelowSplit(Rule[SinkBelowSplitSite]):
    """``split(dequantize(q, s))[i]`` becomes ``dequantize(split(q)[i], s_i)``.

    Before::

                             .-- part 0
        q -> dequantize -> split
                             '-- part 1

    After::

                .-- dequantize -- part 0
        q -> split
                '-- dequantize -- part 1

    Refuses: a dequantize that something else reads too; a block that spans two parts; a part that
    leaves the graph, whose strides would change.
    """

    name = "sink-below-split"
    anchors: ClassVar[tuple[OpOverload, ...]] = SPLITS
    exactness = Exactness.EXACT

    def match(self, node: Node) -> SinkBelowSplitSite | Miss:
        """Match a split of a dequantize whose parameters follow every part."""
        dequantize = as_dequantize(arguments(node)["self"])
        if dequantize is None or not node.users:
            return Miss(MissCode.PATTERN, node, "it does not split a dequantize", progress=0)
        if len(dequantize.node.users) > 1:
            text = "its dequantize has other readers besides the split"
            return Miss(MissCode.SHARED, dequantize.node, text, progress=2)
        steps = []
        for part in node.users:
            movement = movement_of(part)
            if movement is None:
                text = "a part of unknown size"
                return Miss(MissCode.SHAPE, node, text, progress=2)
            step = sink_step(dequantize, movement)
            if isinstance(step, Miss):
                return step
            with torch.no_grad():
                dense = torch.empty_like(tensor_of(part))
            if leaves_graph(part) and not same_strides(dense, tensor_of(part)):
                text = "a part leaves the graph, and its strides would change"
                return Miss(MissCode.SHAPE, part, text, progress=3)
            steps.append(step)
        return SinkBelowSplitSite(node, dequantize, tuple(steps))

    def rewrite(self, site: SinkBelowSplitSite, rw: Rewriter) -> None:
        """Split the stored numbers, and dequantize every part that is read."""
        a = arguments(site.node)
        op = overload_of(site.node)
        assert op is not None, "the anchor is a call of an op"
        rest = [value for name, value in a.items() if name != "self"]
        pieces = rw.call(op, site.dequantize.q, *rest)
        for step in site.parts:
            part = step.movement.node
            assert part.target is operator.getitem, "a part of a split is an item of it"
            q = rw.item(pieces, int(str(part.args[1])))
            params = moved_params(rw, site.dequantize.params, [step.moved])
            rw.replace(part, rw.call(ops.dequantize, *params.call_args(q)))
