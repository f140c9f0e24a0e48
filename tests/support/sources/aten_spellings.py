"""What the tests of the spellings in plain ATen share: applying a rule, and comparing values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from qfuse.ir.events import Exactness, MissCode, RolledBack
from qfuse.ir.graph.stage_graph import CapturedGraph, StageGraph
from qfuse.ir.graph.text import to_text
from qfuse.rewrite.clone import clone
from qfuse.rewrite.compare import compare
from qfuse.rewrite.context import PassResult, RewriteContext
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Miss, Rule
from qfuse.rewrite.site_check import SiteChecker
from qfuse.rewrite.tolerance import SITE
from qfuse.rewrite.values import Values, wide_value
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import run

aten = torch.ops.aten


def finish(b: GraphBuilder, *outs: Node) -> CapturedGraph:
    """Finish a source graph."""
    return b.done(*outs, stage=CapturedGraph)


def golden(program: StageGraph, *rules: Rule[Any]) -> str:
    """Apply ``rules``; return the graph and what fired."""
    fired = apply_rules(program, rules).fired
    names = ", ".join(f"{name} {count}" for name, count in fired.items())
    return f"{to_text(program.graph)}\nfired: {names}"


def refusal(program: StageGraph, rule: Rule[Any]) -> tuple[MissCode, str]:
    """Apply ``rule``, which must change nothing; return code and node of its closest refusal."""
    before = to_text(program.graph)
    assert not apply_rules(program, [rule]).modified
    assert to_text(program.graph) == before
    found = [rule.match(n) for n in program.graph.nodes if n.target in rule.anchors]
    misses = [miss for miss in found if isinstance(miss, Miss)]
    assert len(misses) == len(found) > 0
    closest = max(misses, key=lambda miss: miss.progress)
    assert closest.reason
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
        rules: What is applied.
        exact: Compare the outputs by bits; otherwise by the noise of the source around float64.
    """
    source = clone(program)
    checker = SiteChecker(program, inputs)
    result = apply_rules(program, rules, RewriteContext("test", checker=checker))
    assert not program.log.of(RolledBack), program.log.of(RolledBack)
    program.module.recompile()
    new, old, meant = run(program, inputs), run(source, inputs), truth(source, inputs)
    exactness = Exactness.EXACT if exact else Exactness.ROUNDING
    for parts in zip(new, old, meant, strict=True):
        verdict = compare(*parts, exactness, SITE)
        assert verdict.wrong is None, f"{verdict.wrong}\n{to_text(program.graph)}"
    return result


def truth(program: StageGraph, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the meaning of each output in float64, ``None`` where there is none."""
    values = Values(program.module, inputs)
    outs = program.graph.output_node().args[0]
    assert isinstance(outs, (list, tuple)), "the output is one flat tuple"
    return [wide_value(out, values, frozenset()) for out in outs]  # type: ignore[arg-type]


def calls(program: StageGraph) -> list[str]:
    """Return the names of the ops that are called, in order."""
    return [
        str(n.target).removesuffix(".default") for n in program.graph.nodes if n.op[:4] == "call"
    ]


def whole(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return small whole numbers, whose products have exact sums in every order."""
    return torch.randint(-4, 5, shape).to(dtype)


def codes(*shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    """Return random quantized values of the whole range."""
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max + 1, shape).to(dtype)


def scales(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random scales, none of them a power of two."""
    return (torch.rand(shape) * 0.02 + 3e-3).to(dtype)
