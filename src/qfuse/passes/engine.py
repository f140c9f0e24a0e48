"""Runs a pass on a caller's graph, atomically; unchanged ops keep their dialect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from qfuse.ir.events import Event, Fired, Missed
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.passes.attempt import Attempt, RewriteTask, attempt
from qfuse.passes.examples import Examples
from qfuse.passes.outcome import PASS_STAGE, PassOutcome
from qfuse.passes.raw import RawGraph, take
from qfuse.passes.refuse import check_graph
from qfuse.report import Report
from qfuse.report.facts import Facts
from qfuse.rewrite.clone import clone

# Every growth and every withdrawal runs the whole pass again, so both are bounded. After that many
# the whole graph is imported, or nothing is done.
_GROWTHS = 3
_WITHDRAWALS = 16


def run_pass(
    name: str, work: RewriteTask, module: GraphModule, examples: Examples | None
) -> PassOutcome:
    """Run ``work`` on the graph of ``module``, in place and atomically.

    A first run imports all of a copy to canonical ops, to find what there is to do. Later runs
    import only the nodes that the changes depend on, so that all others stay as the caller wrote
    them. Results that cannot be exported to the source's dialect are not done.

    Raises:
        GraphError: The graph is not supported.
        NormalizeError: A quantization op is malformed.
    """
    raw = take(check_graph(module), examples, assume=work.assume_equal)
    whole = attempt(raw.program, work, None)
    done, withdrawn = (whole, ()) if not whole.counts else _Narrowing(raw, work, whole).run()
    events = _events(whole, done, withdrawn, work)
    report = Report(tuple(events), Facts(standalone_pass=name))
    if not done.counts:
        return PassOutcome(module, modified=False, report=report)
    unused = raw.reapply_views(done.program)
    return PassOutcome(module, modified=True, report=report, unused=unused)


@dataclass(slots=True)
class _Narrowing:
    """Finds the smallest set of nodes to import to canonical ops."""

    raw: RawGraph
    work: RewriteTask
    whole: Attempt

    def run(self) -> tuple[Attempt, tuple[Missed, ...]]:
        """Return the final attempt, and the reasons for what was not done."""
        scope = self.whole.needed
        done = self._fit(scope)
        withdrawn: list[Missed] = []
        barred: frozenset[str] = frozenset()
        for _ in range(_WITHDRAWALS):
            if not done.stranded:
                return done, tuple(withdrawn)
            withdrawn += done.misses
            barred |= done.stranded
            scope = (done.needed | scope) - barred
            done = attempt(self.raw.program, self.work, scope)
        # Nothing is done rather than something that the source's dialect cannot express.
        return Attempt(clone(self.raw.program)), tuple(withdrawn)

    def _fit(self, scope: frozenset[str]) -> Attempt:
        """Grow the scope until every change of the first run is done."""
        for _ in range(_GROWTHS):
            done = attempt(self.raw.program, self.work, scope)
            if _does(done.counts, self.whole.counts):
                return done
            scope = _grown(self.raw.program, scope)
        return self.whole


def _does(counts: Counter[str], wanted: Counter[str]) -> bool:
    return all(counts[name] >= count for name, count in wanted.items())


def _grown(program: CapturedGraph, scope: frozenset[str]) -> frozenset[str]:
    """Add the neighbours of all nodes of the scope."""
    names = set(scope)
    for node in program.graph.nodes:
        if node.name in scope:
            names.update(near.name for near in _near(node))
    return frozenset(names)


def _near(node: Node) -> Iterable[Node]:
    return (*node.all_input_nodes, *node.users)


def _events(
    whole: Attempt, done: Attempt, withdrawn: Sequence[Missed], work: RewriteTask
) -> list[Event]:
    """Combine the events of the scoped run with the misses of the whole graph."""
    # The misses are those of the whole graph, which was looked at without a scope.
    dropped = Missed if done.counts else (Missed, Fired)
    events: list[Event] = [e for e in done.program.log if not isinstance(e, dropped)]
    fired = {place.node for e in done.program.log.of(Fired) for place in e.places}
    quantized = tuple(f"{name}." for dialect in work.dialects for name in dialect.namespaces)
    for miss in whole.program.log.of(Missed):
        # A miss of a rule that only prepared for the pass says nothing about the pass.
        own = miss.stage == PASS_STAGE or miss.anchor.op.startswith(quantized)
        if own and miss.anchor.node not in fired:
            events.append(miss)
    return [*events, *dict.fromkeys(withdrawn)]
