"""Divide an optimized graph among backends; what none claims is expanded to ATen."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Literal

from qfuse.ir.errors import ExtensionError
from qfuse.ir.events import EXPAND, HOST, ExpandCause, Lowered
from qfuse.ir.foreign import call_foreign
from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.graph.stage_graph import CLAIM_META, LoweredGraph, OptimizedGraph, place_of
from qfuse.ir.ops import library as ops
from qfuse.ir.refusal import Refusal
from qfuse.ir.stages.verify import verify
from qfuse.lower.expand.describe import describe_node
from qfuse.lower.expand.expand import Expander
from qfuse.lower.fold import fold_constants
from qfuse.lower.layout.max_pools import widen_max_pools
from qfuse.lower.originals import Originals
from qfuse.lower.unfused import log_unfused
from qfuse.rewrite.claimant import Claimant
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.prelude import Node, OpOverload
from qfuse.rewrite.session import RewriteSession

_OWN = (*ops.CANONICAL, *ops.FUSED)

Refusals = tuple[tuple[str, str], ...]
"""The backends that refused a node, each with its reason."""


def claim_ops(
    program: OptimizedGraph,
    claimants: Sequence[Claimant],
    context: RewriteContext | None = None,
) -> LoweredGraph:
    """Let backends claim nodes of ``program``, which is consumed, and expand the rest to ATen.

    Every node is offered to the claimants in order, before anything is expanded; the first that
    claims it gets it. Its name is recorded in ``node.meta["qfuse_claim"]``, and in the log. A
    claimed node stays as it is. Expansions are exact, for all granularities: a fused op becomes
    quantize, dequantize and ATen, which are offered in turn, and what is then left becomes ATen.

    Args:
        program: The graph.
        claimants: The backends, first choice first.
        context: Value checks; by default none.

    Raises:
        ExtensionError: A backend answers neither ``True`` nor a ``Refusal``, fails, or edits the
            graph when it is asked.
    """
    context = context or RewriteContext("lower")
    before = _calls(program)
    for node in program.graph.nodes:
        _offer(node, claimants, program, context.stage)
        if CLAIM_META not in node.meta:
            log_unfused(node, program.log, context.stage)
    if _calls(program) != before:
        # An edit of another node than the one that was asked about.
        raise _edited(", ".join(claimant.name for claimant in claimants))
    _expand(program, claimants, context)
    fold_constants(program, context)
    Originals(RewriteSession(program, context)).drop()
    # Edits do not regenerate the module's code.
    program.module.recompile()
    done = LoweredGraph(program.module, program.signature, program.log)
    verify(done)
    return done


def _offer(node: Node, claimants: Sequence[Claimant], program: OptimizedGraph, stage: str) -> None:
    """Offer a node; record who claims it, or that it is expanded or runs in torch."""
    if node.target is operator.getitem:
        _inherit(node)
        return
    claim, refusals = _claim_of(node, claimants)
    if claim is not None:
        node.meta[CLAIM_META] = claim
    elif not refusals and not is_call(node, *ops.FUSED):
        return
    kernel = claim or (EXPAND if is_call(node, *_OWN) else HOST)
    what = describe_node(node)
    cause = ExpandCause.NO_KERNEL if kernel == EXPAND else None
    program.log.add(Lowered(stage, place_of(node), kernel, what, losers=refusals, cause=cause))


def _expand(
    program: OptimizedGraph, claimants: Sequence[Claimant], context: RewriteContext
) -> None:
    """Expand every op of qfuse that was not claimed.

    Fused ops become quantize, dequantize and ATen first, which are offered in turn.
    """
    session = RewriteSession(program, context)
    # torch cannot pool large channels-last images of 8-bit values.
    widen_max_pools(session)
    before = set(program.graph.nodes)
    _expand_calls(ops.FUSED, Expander(in_parts=True), session)
    for node in program.graph.nodes:
        if node not in before:
            _offer(node, claimants, program, context.stage)
    _expand_calls(ops.CANONICAL, Expander(), session)


def _expand_calls(kinds: Sequence[OpOverload], expander: Expander, session: RewriteSession) -> None:
    for node in list(session.program.graph.nodes):
        if is_call(node, *kinds) and CLAIM_META not in node.meta:
            expander.replace(node, session)


def _claim_of(node: Node, claimants: Sequence[Claimant]) -> tuple[str | None, Refusals]:
    """Return who claims ``node``, and the refusals of those that were asked before."""
    op, refusals = overload_of(node), list[tuple[str, str]]()
    for claimant in claimants:
        if op is None or op not in claimant.supported_ops:
            continue
        answer = _answer(claimant, node)
        if answer is True:
            return claimant.name, tuple(refusals)
        refusals.append((claimant.name, answer.reason))
    return None, tuple(refusals)


def _answer(claimant: Claimant, node: Node) -> Literal[True] | Refusal:
    """Ask whether a node is claimed."""
    what, where = f"is_legal of the backend {claimant.name!r}", str(place_of(node))
    before = _near(node)
    answer: object = call_foreign(
        claimant.is_legal,
        node,
        what=what,
        on=node.target,
        where=where,
        fix="repair the backend",
    )
    if _near(node) != before:
        raise _edited(claimant.name, where)
    if answer is True or isinstance(answer, Refusal):
        return answer
    raise ExtensionError(
        f"{what} returned {answer!r} for {node.target}",
        where=where,
        fix="return True, or a qfuse.ir.refusal.Refusal with the reason",
    )


def _near(node: Node) -> tuple[object, ...]:
    """Return what an edit of a call or of the number of nodes changes."""
    value = id(node.meta.get("val"))
    return len(node.graph.nodes), node.op, node.target, node.args, node.kwargs, value


def _calls(program: OptimizedGraph) -> list[tuple[object, ...]]:
    return [(node, node.target, node.args, node.kwargs) for node in program.graph.nodes]


def _edited(names: str, where: str | None = None) -> ExtensionError:
    return ExtensionError(
        f"is_legal of the backend {names!r} edits the graph",
        where=where,
        fix="repair the backend: move the edit to a rule (Backend.rules)",
    )


def _inherit(item: Node) -> None:
    """Record that a result belongs to whoever computes it."""
    source = item.args[0]
    if isinstance(source, Node) and CLAIM_META in source.meta:
        item.meta[CLAIM_META] = source.meta[CLAIM_META]
