"""Give activations that ops read by rows the order of rows in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch.fx import Node

from qfuse.ir.events import Fired
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import StageGraph, place_of
from qfuse.ir.memory_formats import format_of
from qfuse.ir.ops.views import shape_of
from qfuse.ir.sizes import is_row_major
from qfuse.rewrite.context import PassResult, RewriteContext
from qfuse.rewrite.graph_pass import Pass
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Rewriter, arguments, aten
from qfuse.rewrite.regions import Region, RegionRewrite, RegionSearch, copy_seconds
from qfuse.rewrite.session import Applied, RewriteSession

# Of a matrix product, the first operand has rows.
_PRODUCTS = (aten.linear.default, aten.mm.default, aten.matmul.default, aten.bmm.default)
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

    Refuses: a region with a value that leaves it and is not dense, or of unknown size. Does not
    pay where the ops that read rows would copy no more than is copied at the border.
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
            if not rows or not context.covers(node):
                continue
            if not _pays(region, rows, program, context):
                text = "copying it takes as long as the ops that read its rows save"
                result.miss(
                    program, context, self.name, node, Miss(MissCode.PROFIT, node, text, progress=0)
                )
            elif self._rewrite(region, search, session):
                result.fired[self.name] += 1
        return result

    def _rewrite(self, region: Region, search: RegionSearch, session: RewriteSession) -> bool:
        node = next(iter(region.nodes))
        place, stage = place_of(node), session.context.stage

        def fired(key: str, rw: Rewriter, _: object) -> Fired:
            del rw
            return Fired(stage, self.name, key, self.exactness, (place,))

        edit = RegionRewrite(region, search).apply
        done = session.rewrite(self.name, node, edit, proof=self.exactness, event=fired)
        return isinstance(done, Applied)


class _Search(RegionSearch):
    """Finds the regions that start at elementwise ops on permuted values."""

    def starts(self, node: Node) -> bool:
        """Whether an elementwise op returns a value that is neither row-major nor an image."""
        value = node.meta.get("val")
        return (
            isinstance(value, torch.Tensor)
            and node.op == "call_function"
            and torch.Tag.pointwise in getattr(node.target, "tags", ())
            and format_of(value) is None
        )

    def format(self, rank: int) -> torch.memory_format | None:
        """Return the row-major format."""
        del rank
        return torch.contiguous_format

    def enters(self, value: torch.Tensor) -> bool:
        """Whether an operand is neither row-major nor an image."""
        return format_of(value) is None

    def changes(self, before: torch.Tensor, after: torch.Tensor) -> bool:
        """Whether a result becomes row-major."""
        return is_row_major(after) and not is_row_major(before)


def _pays(
    region: Region, rows: Sequence[Node], program: StageGraph, context: RewriteContext
) -> bool:
    """Whether the ops that read rows would copy more than is copied at the border."""
    if context.cost is None:
        return len(rows) > len(region.copies)
    symbols = program.signature.symbols
    border = copy_seconds(region.copies, context.cost, symbols)
    return border < copy_seconds(rows, context.cost, symbols)


def _read_by_rows(region: Region) -> list[Node]:
    """Return the values that ops read by rows, once per op."""
    values = dict.fromkeys((*region.nodes, *region.copies))
    return [value for value in values for user in value.users if _reads_rows(user, value)]


def _reads_rows(user: Node, value: Node) -> bool:
    """Whether an op needs the elements of the last axis of ``value`` one after the other."""
    if is_call(user, *_NORMS):
        return True
    if is_call(user, *_PRODUCTS):
        return user.args[0] is value
    if is_call(user, aten.addmm.default):
        return arguments(user)["mat1"] is value
    if is_call(user, *_SOFTMAXES, *_REDUCTIONS):
        return _is_last(arguments(user)["dim"], shape_of(value))
    return False


def _is_last(axes: object, shape: Sequence[object]) -> bool:
    one = list(axes) if isinstance(axes, (list, tuple)) else [axes]
    return one in ([-1], [len(shape) - 1])
