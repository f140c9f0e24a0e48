"""Apply rules to small graphs: the text of what came of them, refusals, and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qfuse.ir.events import Exactness, MissCode, RolledBack
from qfuse.ir.graph.stage_graph import StageGraph
from qfuse.ir.graph.text import to_text
from qfuse.rewrite.clone import clone
from qfuse.rewrite.compare import compare
from qfuse.rewrite.context import PassResult, RewriteContext
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Miss, Rule
from qfuse.rewrite.site_check import SiteChecker
from qfuse.rewrite.tolerance import SITE
from qfuse.rewrite.values import Values, wide_value
from qfuse.testing.run import run
from qfuse.testing.source import results


def golden(program: StageGraph, *rules: Rule[Any]) -> str:
    """Apply ``rules``; return the text of the graph and what fired."""
    fired = apply_rules(program, rules).fired
    names = ", ".join(f"{name} {count}" for name, count in fired.items())
    return f"{to_text(program.graph)}\nfired: {names}"


def refusal(program: StageGraph, rule: Rule[Any]) -> tuple[MissCode, str]:
    """Apply ``rule``, which must change nothing; return code and node of its closest refusal."""
    before = to_text(program.graph)
    found = [rule.match(n) for n in program.graph.nodes if n.target in rule.anchors]
    misses = [miss for miss in found if isinstance(miss, Miss)]
    assert found, f"{rule.name} was not tried: no node calls one of its anchors\n{before}"
    assert len(misses) == len(found), f"{rule.name} matched {len(found) - len(misses)} nodes"
    assert not apply_rules(program, [rule]).modified, f"{rule.name} fired"
    assert to_text(program.graph) == before, f"the match of {rule.name} changed the graph"
    closest = max(misses, key=lambda miss: miss.progress)
    assert closest.reason, f"{rule.name} refuses without a reason"
    return closest.code, closest.at.name


def assert_same_values(
    program: StageGraph,
    inputs: Sequence[torch.Tensor],
    *rules: Rule[Any],
    exact: bool = False,
) -> PassResult:
    """Apply ``rules`` and compare the outputs, and every single rewrite, by exactness class.

    Args:
        program: The source graph, which is rewritten.
        inputs: One tensor per input.
        rules: The rules to apply.
        exact: Compare the outputs by bits; otherwise by the noise of the source around float64.
    """
    source = clone(program)
    checker = SiteChecker(program, inputs)
    result = apply_rules(program, rules, RewriteContext("test", checker=checker))
    assert_nothing_undone(program)
    program.module.recompile()
    new, old, meant = run(program, inputs), run(source, inputs), truth(source, inputs)
    exactness = Exactness.EXACT if exact else Exactness.ROUNDING
    for parts in zip(new, old, meant, strict=True):
        verdict = compare(*parts, exactness, SITE)
        assert verdict.wrong is None, f"{verdict.wrong}\n{to_text(program.graph)}"
    return result


def assert_nothing_undone(program: StageGraph) -> None:
    """Assert that no rewrite was rolled back because it changed values."""
    for event in program.log.of(RolledBack):
        place = ", ".join(map(str, event.places))
        raise AssertionError(
            f"the rule {event.rule} changed values by more than its exactness class allows, "
            f"at {place}: {event.reason}\n"
            "  do: correct the rewrite, refuse such a site, or state the class that is true"
        )


def truth(program: StageGraph, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the meaning of each output in float64, ``None`` where there is none."""
    values = Values(program.module, inputs)
    return [wide_value(out, values, frozenset()) for out in results(program)]
