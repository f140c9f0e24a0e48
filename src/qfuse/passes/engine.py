"""Runs a pass on a caller's graph: what did not change keeps its spelling, or nothing happens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from qfuse.ir.events import Event, Fired, Missed
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.passes.attempt import Attempt, Work, attempt
from qfuse.passes.examples import Examples
from qfuse.passes.outcome import PASS_STAGE, PassOutcome
from qfuse.passes.raw import RawGraph, take
from qfuse.passes.refuse import check_graph
from qfuse.report import Report
from qfuse.rewrite.clone import clone

_GROWTHS = 3
_WITHDRAWALS = 16


def run_pass(name: str, work: Work, module: GraphModule, examples: Examples | None) -> PassOutcome:
    """Do ``work`` to the graph of ``module``, in place, wholly or not at all.

    First all of a copy is spelled canonically, to see what there is to do. Then only the nodes that
    the changes are made of are, so that everything else stays as the caller wrote it. What cannot
    be written back in the dialect of its source is left alone.

    Raises:
        GraphError: The graph cannot be read.
        NormalizeError: A quantized op of it is malformed.
    """
    raw = take(check_graph(module), examples, assume=work.assume_equal)
    whole = attempt(raw.program, work, None)
    done, withdrawn = (whole, ()) if not whole.counts else _Narrowing(raw, work, whole).run()
    events = _events(whole, done, withdrawn, work)
    report = Report(tuple(events), {"pass": name})
    if not done.counts:
        return PassOutcome(module, modified=False, report=report)
    unused = raw.reapply_views(done.program)
    return PassOutcome(module, modified=True, report=report, unused=unused)


@dataclass(slots=True)
class _Narrowing:
    """Finds the fewest nodes that have to be spelled canonically."""

    raw: RawGraph
    work: Work
    whole: Attempt

    def run(self) -> tuple[Attempt, tuple[Missed, ...]]:
        """Return what is to be done, and why some of it is not."""
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
        return Attempt(clone(self.raw.program)), tuple(withdrawn)

    def _fit(self, scope: frozenset[str]) -> Attempt:
        """Let the scope grow until everything that there is to do is done."""
        for _ in range(_GROWTHS):
            done = attempt(self.raw.program, self.work, scope)
            if _does(done.counts, self.whole.counts):
                return done
            scope = _grown(self.raw.program, scope)
        return self.whole


def _does(counts: Counter[str], wanted: Counter[str]) -> bool:
    return all(counts[name] >= count for name, count in wanted.items())


def _grown(program: CapturedGraph, scope: frozenset[str]) -> frozenset[str]:
    """Add the neighbours of every node of the scope."""
    names = set(scope)
    for node in program.graph.nodes:
        if node.name in scope:
            names.update(near.name for near in _near(node))
    return frozenset(names)


def _near(node: Node) -> Iterable[Node]:
    return (*node.all_input_nodes, *node.users)


def _events(whole: Attempt, done: Attempt, withdrawn: Sequence[Missed], work: Work) -> list[Event]:
    """Put together what was done to the part, and what was missed in all of the graph."""
    dropped = Missed if done.counts else (Missed, Fired)
    events: list[Event] = [e for e in done.program.log if not isinstance(e, dropped)]
    fired = {place.node for e in done.program.log.of(Fired) for place in e.places}
    quantized = tuple(f"{name}." for dialect in work.dialects for name in dialect.namespaces)
    for miss in whole.program.log.of(Missed):
        own = miss.stage == PASS_STAGE or miss.anchor.op.startswith(quantized)
        if own and miss.anchor.node not in fired:
            events.append(miss)
    return [*events, *dict.fromkeys(withdrawn)]
