"""Fold what is computed from constants into constants, where that takes no more memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.fx.node import map_arg

from qfuse.ir.errors import RewriteError
from qfuse.ir.events import Fired
from qfuse.ir.graph.memory import address_of
from qfuse.ir.graph.stage_graph import StageGraph, constant_of, op_name, place_of
from qfuse.ir.ops.constants import operands_first
from qfuse.ir.ops.views import dtype_of
from qfuse.optimize.match.constant_region import ConstantRegions, held_bytes
from qfuse.rewrite.context import PassResult, RewriteContext
from qfuse.rewrite.graph_pass import Pass
from qfuse.rewrite.prelude import Exactness, Node, Rewriter
from qfuse.rewrite.session import Applied, RewriteSession

# A smaller constant that stays computed is not worth a line of the report.
_REPORTED = 1024


class FoldConstants(Pass):
    """A chain of deterministic ops on constants becomes a constant.

    Before::

        const w (float32) -> _to_copy(bfloat16) -> linear

    After::

        const w_folded (bfloat16) -> linear

    Exact: the same ops compute the value, once.

    Refuses: results that together are larger than the constant that they replace, such as int8
    values cast to float; a constant that has other users, so that it would be stored twice; buffers
    that the model writes; random ops and those of other libraries; a result that leaves the graph,
    which the caller may write to; results of dynamic size.
    """

    name = "fold-constants"
    exactness = Exactness.EXACT

    def run(self, program: StageGraph, context: RewriteContext) -> PassResult:
        """Fold the constants one by one, so that one at a time is in memory twice."""
        result = PassResult()
        session = RewriteSession(program, context)
        session.editor.sweep()
        regions = ConstantRegions.of(program)
        for home, ends, miss in regions.groups():
            covered = all(map(context.covers, ends))
            if miss is not None:
                # The integers of a product have its kernel, or are widened for lack of one.
                is_float = dtype_of(miss.at).is_floating_point
                if held_bytes(home) >= _REPORTED and is_float:
                    result.miss(program, context, self.name, miss.at, miss)
            elif covered and self._fold(home, ends, regions.shared_views(home), session):
                result.fired[self.name] += 1
        return result

    def _fold(
        self, home: Node, ends: Sequence[Node], shares: bool, session: RewriteSession
    ) -> bool:
        """Replace ``ends`` by constants in one edit; return whether it was kept."""
        stage, places = session.context.stage, tuple(map(place_of, ends))

        def fired(key: str, rw: Rewriter, _: object) -> Fired:
            made = tuple(node.name for node in rw.journal.made)
            note = f"computed from %{home.name}"
            return Fired(stage, self.name, key, self.exactness, places, made, note)

        edit = partial(_replace, home, ends, shares)
        done = session.rewrite(self.name, ends[0], edit, proof=self.exactness, event=fired)
        return isinstance(done, Applied)


def _replace(home: Node, ends: Sequence[Node], shares: bool, rw: Rewriter) -> None:
    # Before the first one: a later end may be an operand of an earlier one's users.
    for end in ends:
        with rw.instead_of(end):
            value = _compute(end)
            own = constant_of(home)
            assert own is not None, "a region starts at constants"
            if not shares and value.numel() < own.numel() and address_of(value) == address_of(own):
                # A slice must not keep the rest of the constant alive.
                value = value.clone()
            rw.replace(end, rw.constant(value, f"{home.target}_folded"))


def _compute(node: Node) -> torch.Tensor:
    """Return the value of ``node``, whose operands are all computed from constants."""
    known: dict[Node, Any] = {}
    for top in operands_first(node):
        known[top] = _call(top, known)
    value: torch.Tensor = known[node]
    traced = node.meta["val"]
    if value.stride() != traced.stride():
        # As traced, since users were traced with them; a trace through decompositions may differ.
        value = torch.empty_strided(value.shape, traced.stride(), dtype=value.dtype).copy_(value)
    return value


def _call(node: Node, known: dict[Node, Any]) -> Any:
    if node.op == "get_attr":
        return constant_of(node)
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: known[n])
    assert callable(node.target), "a computed node is a call"
    try:
        with torch.no_grad():
            return node.target(*args, **kwargs)
    except RuntimeError as error:
        raise RewriteError(f"{op_name(node)} fails: {error}", where=str(place_of(node))) from error
