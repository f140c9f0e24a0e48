"""Give activations that ops read by rows the order of rows in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch.fx import Node

from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import StageGraph
from qfuse.ir.memory_formats import format_of
from qfuse.ir.sizes import is_row_major, is_smaller, same_size
from qfuse.rewrite.context import PassResult, RewriteContext
from qfuse.rewrite.graph_pass import Pass
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, arguments, aten
from qfuse.rewrite.regions import Region, RegionRewrite, RegionSearch, copy_seconds
from qfuse.rewrite.session import RewriteSession

# The operand of a matrix product that has rows.
_PRODUCTS: Mapping[Any, str] = MappingProxyType(
    {
        aten.linear.default: "input",
        aten.mm.default: "self",
        aten.matmul.default: "self",
        aten.bmm.default: "self",
        aten.addmm.default: "mat1",
    }
)
_NORMS = (aten.layer_norm.default, aten.native_layer_norm.default, aten.rms_norm.default)
_SOFTMAXES = (aten._softmax.default, aten.softmax.int)
_REDUCTIONS = (
    *(aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default),
    *(aten.var.correction, aten.var_mean.correction),
)


class MakeRowMajor(Pass):
    """Copy a permuted activation once, and compute what follows from it in row-major order.

    Before::

        x -> permute -> add -> layer_norm -> linear
                         '---> add -> layer_norm

    After::

        x -> permute -> clone -> add -> layer_norm -> linear
                                  '---> add -> layer_norm

    Elementwise ops keep the strides of their operands, so that a residual sum that begins with the
    permuted result of a convolution stays permuted through all layers. Kernels read whole rows:
    norms, softmaxes, reductions over the last axis and products would each read or copy elements
    that are far apart.

    A region grows through every op whose result is row-major when its operands are. Values that
    leave the graph, or that a user reads by strides, are copied back.

    Images in channels-last memory are left to the channels-last regions of convolutions.

    Refuses: a region with a value that leaves it and has gaps. Does not pay where the ops that
    read rows would copy no more than is copied at the border.
    """

    name: ClassVar[str] = "make-row-major"
    # A vectorized reduction adds in another order.
    exactness = Exactness.ROUNDING

    def run(self, program: StageGraph, context: RewriteContext) -> PassResult:
        """Rewrite every region, in one search."""
        result = PassResult()
        session = RewriteSession(program, context)
        search = _Search(session.editor.infer)
        for region in search.regions(program):
            node = next(iter(region.nodes))
            rows = _read_by_rows(region)
            if not rows or not all(map(context.covers, region.nodes)):
                continue
            miss = _refuse(region, rows, program, context)
            if miss is not None:
                result.miss(program, context, self.name, node, miss)
                continue
            edit = RegionRewrite(region, search).apply
            if self.rewrite_at(node, edit, session, proof=self.exactness):
                result.fired[self.name] += 1
        return result


class _Search(RegionSearch):
    """Finds the regions that start at elementwise ops on permuted values."""

    def starts(self, node: Node) -> bool:
        """Whether an elementwise op returns permuted values that are not images.

        Where only rows are permuted, such as those of heads, ops read them in place.
        """
        value = node.meta.get("val")
        return (
            isinstance(value, torch.Tensor)
            and node.op == "call_function"
            and torch.Tag.pointwise in getattr(node.target, "tags", ())
            and not _has_adjacent_elements(value)
            and _is_permuted(value)
        )

    def format(self, rank: int) -> torch.memory_format | None:
        """Return the row-major format."""
        del rank
        return torch.contiguous_format

    def enters(self, value: torch.Tensor) -> bool:
        """Whether an operand has permuted values, and is not an image."""
        return _is_permuted(value)

    def changes(self, before: torch.Tensor, after: torch.Tensor) -> bool:
        """Whether a result that is not an image becomes row-major."""
        return is_row_major(after) and format_of(before) is None


def _is_permuted(value: torch.Tensor) -> bool:
    """Whether memory has the axes in another order than row-major and channels-last tensors.

    Gaps, and axes that are expanded, permute nothing.
    """
    if value.layout is not torch.strided or format_of(value) is not None:
        return False
    pairs = zip(value.shape, value.stride(), strict=True)
    steps = [step for size, step in pairs if not same_size(size, 1) and not same_size(step, 0)]
    return any(is_smaller(outer, inner) for outer, inner in pairwise(steps))


def _refuse(
    region: Region, rows: Sequence[Node], program: StageGraph, context: RewriteContext
) -> Miss | None:
    """Refuse a region whose strides cannot be restored, or that takes no less time."""
    node = next(iter(region.nodes))
    if not region.can_be_left:
        text = "no copy has the strides of a value that leaves the region"
        return Miss(MissCode.SHAPE, node, text, progress=1)
    symbols, cost = program.signature.symbols, context.cost
    pays = len(region.copies) < len(rows)
    if cost is not None:
        pays = copy_seconds(region.copies, cost, symbols) < copy_seconds(rows, cost, symbols)
    text = "copying it takes as long as the ops that read its rows save"
    return None if pays else Miss(MissCode.PROFIT, node, text, progress=0)


def _read_by_rows(region: Region) -> list[Node]:
    """Return the values of a region that ops read by rows, as often as they are read.

    Products of one value copy it once at most, and may be merged.
    """
    read: list[Node] = []
    for node, leaving in region.nodes.items():
        value = node.meta["val"]
        # Rows that lie apart are read as fast.
        if isinstance(value, torch.Tensor) and not _has_adjacent_elements(value):
            users = [user for user in node.users if user not in leaving]
            products = any(_is_product_of(user, node) for user in users)
            read += [node] * (products + sum(_reads_rows(user, value) for user in users))
    return read


def _has_adjacent_elements(value: torch.Tensor) -> bool:
    """Whether the elements of each row lie one after the other."""
    return value.dim() == 0 or same_size(value.stride(-1), 1)


def _is_product_of(user: Node, value: Node) -> bool:
    """Whether ``user`` multiplies the rows of ``value``."""
    first = _PRODUCTS.get(user.target)
    return first is not None and arguments(user)[first] is value


def _reads_rows(user: Node, value: torch.Tensor) -> bool:
    """Whether a norm, a softmax or a reduction needs the elements of the last axis in a row."""
    if is_call(user, *_NORMS):
        return True
    if not is_call(user, *_SOFTMAXES, *_REDUCTIONS):
        return False
    axes: Any = arguments(user)["dim"]
    one = list(axes) if isinstance(axes, (list, tuple)) else [axes]
    return one in ([-1], [value.dim() - 1])
