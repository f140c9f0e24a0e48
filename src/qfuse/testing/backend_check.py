"""Check a backend on a battery of small graphs: what it claims is right, the rest is expanded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from qfuse.backends import Backend, Runner
from qfuse.ir.errors import USER_CODE_ERRORS, QfuseError
from qfuse.ir.events import Exactness, Lowered
from qfuse.ir.graph.stage_graph import LoweredGraph, OptimizedGraph
from qfuse.ir.graph.text import to_text
from qfuse.lower import claim_ops
from qfuse.optimize import optimize, rules_for_claims
from qfuse.rewrite.clone import clone
from qfuse.rewrite.compare import compare
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.tolerance import BACKEND_LEVELS, BACKEND_STEPS, SITE
from qfuse.testing.cases import BackendCase, battery
from qfuse.testing.rules import truth
from qfuse.testing.run import random_inputs, run
from qfuse.testing.source import describe_difference, equal_but_for_nan, strides

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """What became of one graph of the battery.

    Attributes:
        case: Its name.
        claimed: The ops that were claimed, each with its count.
        refused: The other ops that the backend was asked about, each with its reason.
        wrong: What is wrong, and what to do; ``None`` if nothing is.
        error: The exception that the backend raised, if it did.
    """

    case: str
    claimed: Counter[str]
    refused: tuple[tuple[str, str], ...]
    wrong: str | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class BackendCoverage:
    """What a backend claims of the battery; ``print`` shows a line per graph.

    Attributes:
        outcomes: One per graph.
    """

    outcomes: tuple[CaseOutcome, ...]

    @property
    def claimed(self) -> Counter[str]:
        """How many ops were claimed, by op."""
        total: Counter[str] = Counter()
        for outcome in self.outcomes:
            total += outcome.claimed
        return total

    def __str__(self) -> str:
        lines = []
        for outcome in self.outcomes:
            parts = [f"claims {op}" for op in outcome.claimed]
            parts += [f"{op}: {why}" for op, why in outcome.refused]
            lines.append(f"{outcome.case}: {'; '.join(parts) or 'torch'}")
        return "\n".join(lines)


def check_backend(backend: Backend, cases: Iterable[BackendCase] | None = None) -> BackendCoverage:
    """Check a backend on small graphs over op, granularity and dtype.

    For each graph: the backend answers the same when it is asked twice, with reasons, and does not
    edit the graph; every op that it does not claim is expanded, with the same bits; the compiled
    graph returns the values of the reference, by the exactness class of the backend, with its
    strides and in new memory, also in a second call, and does not write its inputs. Results of a
    ``LOSSY`` backend may be one step off; floats one 255th of their range.

    Args:
        backend: The backend.
        cases: The graphs; by default :func:`qfuse.testing.battery`.

    Raises:
        AssertionError: A check failed; the message says for which graphs, what differs, and where.
    """
    found = tuple(_outcome_of(backend, case) for case in (battery() if cases is None else cases))
    wrong = [outcome for outcome in found if outcome.wrong is not None]
    if wrong:
        shown = "\n".join(f"- {outcome.case}: {outcome.wrong}" for outcome in wrong[:_SHOWN])
        more = f"\n... and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        text = f"the backend {backend.name!r} fails {len(wrong)} of {len(found)} graphs"
        cause = next((outcome.error for outcome in wrong if outcome.error is not None), None)
        raise AssertionError(f"{text}:\n{shown}{more}") from cause
    coverage = BackendCoverage(found)
    assert coverage.claimed, (
        f"the backend {backend.name!r} claims nothing\n"
        f"  do: look at the reasons of is_legal:\n{coverage}"
    )
    return coverage


def _outcome_of(backend: Backend, case: BackendCase) -> CaseOutcome:
    """Check one graph; a backend that raises fails it."""
    try:
        return _outcome(backend, case)
    except (*USER_CODE_ERRORS, QfuseError) as error:
        text = str(error) if isinstance(error, QfuseError) else repr(error)
        return CaseOutcome(case.name, Counter(), (), f"it raises {text}", error)


def _outcome(backend: Backend, case: BackendCase) -> CaseOutcome:
    context = RewriteContext("optimize")
    added = (*backend.rules(), *rules_for_claims(backend.supported_ops))
    graph = optimize(case.program(), context, added=added)
    reference = clone(graph)
    unstable = _asked_twice(backend, graph)
    lowered = claim_ops(graph, [backend])
    events = lowered.log.of(Lowered)
    claimed = Counter(e.place.op for e in events if e.kernel == backend.name)
    refused = tuple((e.place.op, why) for e in events for _, why in e.losers)
    wrong = unstable or _wrong(backend, case, reference, lowered)
    if wrong is not None:
        wrong = f"{wrong}\n{_indented(to_text(lowered.graph))}"
    return CaseOutcome(case.name, claimed, refused, wrong)


def _asked_twice(backend: Backend, graph: OptimizedGraph) -> str | None:
    """Ask for every node; return what is wrong with the answers."""
    before = to_text(graph.graph)
    for node in graph.graph.nodes:
        if node.op != "call_function" or node.target not in backend.supported_ops:
            continue
        one, two = backend.is_legal(node), backend.is_legal(node)
        if (one is True) != (two is True):
            return f"is_legal answers differently for %{node.name} when it is asked twice"
        if one is not True and not getattr(one, "reason", ""):
            return f"is_legal refuses %{node.name} ({node.target}) without a reason"
    if to_text(graph.graph) != before:
        return "is_legal edits the graph; move the edit to a rule (Backend.rules)"
    return None


def _wrong(
    backend: Backend, case: BackendCase, reference: OptimizedGraph, lowered: LoweredGraph
) -> str | None:
    """Run the reference, the expanded graph and the compiled one; return what is wrong."""
    runner = backend.compile(lowered)
    earlier: list[torch.Tensor] = []
    for sizes in case.sizes:
        inputs = random_inputs(reference, **sizes)
        (old,), (expanded,) = run(reference, inputs), run(lowered, inputs)
        # Claimed ops are called as they are, so only an expansion can differ.
        if not equal_but_for_nan(old, expanded):
            return (
                f"an expansion changes bits, a bug of qfuse: {describe_difference(old, expanded)}"
            )
        meant = truth(reference, inputs)[0]
        for call in ("first", "second"):
            wrong = _call(runner, inputs, earlier, old, meant, backend.exactness)
            if wrong is not None:
                return f"the {call} call with the sizes {dict(sizes)}: {wrong}"
    return None


def _call(
    runner: Runner,
    inputs: list[torch.Tensor],
    earlier: list[torch.Tensor],
    old: torch.Tensor,
    meant: torch.Tensor | None,
    exactness: Exactness,
) -> str | None:
    """Run compiled code; return what is wrong with its result, which is added to the earlier."""
    kept = [value.clone() for value in inputs]
    (new,) = runner.run(list(inputs))
    if not all(map(equal_but_for_nan, inputs, kept)):
        return "it writes its inputs"
    if any(_shares_memory(new, value) for value in inputs):
        return "its result shares memory with an input; return a new tensor"
    # They are kept alive, so that their memory cannot be given to this result again.
    if any(_shares_memory(new, value) for value in earlier):
        return "its result shares memory with that of an earlier call; return a new tensor"
    earlier.append(new)
    wrong = _compare(new, old, meant, exactness)
    # Other ops may rely on them, such as a view of the result.
    if wrong is None and strides(new) != strides(old):
        return f"its result has the strides {new.stride()}, the op's has {old.stride()}"
    return wrong


def _shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    memory = one.untyped_storage(), other.untyped_storage()
    return memory[0].data_ptr() == memory[1].data_ptr() and memory[0].nbytes() > 0


def _compare(
    new: torch.Tensor, old: torch.Tensor, meant: torch.Tensor | None, exactness: Exactness
) -> str | None:
    if exactness is not Exactness.LOSSY:
        wrong = compare(new, old, meant, exactness, SITE).wrong
        return None if wrong is None else f"{wrong} ({describe_difference(old, new)})"
    typed = compare(new, old, None, Exactness.LOSSY, SITE).wrong
    if typed is not None or old.numel() == 0:
        return typed
    apart = (new.double() - old.double()).abs()
    allowed: float = BACKEND_STEPS
    unit = "steps"
    if old.is_floating_point():
        low, high = old.double().aminmax()
        allowed, unit = float(high - low) / BACKEND_LEVELS, "in floats"
    # Written so that a NaN is refused.
    if bool((apart <= allowed).all()):
        return None
    place = tuple((~(apart <= allowed)).nonzero()[0].tolist())
    text = f"off by up to {float(apart.max()):.4g} {unit}, allowed are {allowed:.4g}"
    return f"{text}; first at {place}: {new[place]} instead of {old[place]}"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
