"""Check what the rules make of a module: which fire, and that values stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.nn import Module

from qfuse.capture import capture
from qfuse.cost.model import CostModel
from qfuse.ir.events import Exactness, Fired, Missed
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.graph.stage_graph import OptimizedGraph, StageGraph, op_name
from qfuse.ir.graph.text import to_text
from qfuse.ir.signature.caller import Caller
from qfuse.ir.signature.run import run_flat
from qfuse.model_check import ModelCheck
from qfuse.normalize import normalize
from qfuse.normalize.builtin import BUILTIN
from qfuse.normalize.importers.dialect import Dialect
from qfuse.optimize import optimize
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.scheduled import ScheduledRules
from qfuse.rewrite.site_check import SiteChecker
from qfuse.testing.fixed_order import run_fixed_order
from qfuse.testing.rules import assert_nothing_undone
from qfuse.testing.source import describe_difference, equal_but_for_nan

Expected = Mapping[str, int] | Collection[str]
"""Names of rules and ops: each at least once, or exactly as often as it is mapped to."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What the rules made of a module.

    Attributes:
        graph: The graph after optimize.
        fired: How often each rule fired.
        ops: How often the graph calls each op, by names such as ``qfuse.linear``.
    """

    graph: OptimizedGraph
    fired: Counter[str]
    ops: Counter[str]

    def __str__(self) -> str:
        return to_text(self.graph.graph)


def check_rewrite(  # noqa: PLR0913 - one keyword per option
    module: Module | ExportedProgram,
    inputs: Sequence[Any],
    *,
    expect: Expected | str,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    rules: ScheduledRules | Sequence[ScheduledRules] = (),
    dialects: Dialect | Sequence[Dialect] = (),
    cost: CostModel | None = None,
) -> Rewritten:
    """Run capture, normalize and optimize, and check what fired and that values are equal.

    Values are compared three times: for every rewrite, on the values that ``inputs`` produce there,
    by the exactness class of its rule; for the whole module, within the noise of the source; and if
    every rule of optimize that fired is exact, by bits, with sums in a fixed order.

    >>> linear = torch.nn.Linear(8, 4).eval()
    >>> str(check_rewrite(linear, (torch.ones(2, 8),), expect=["aten.linear"]).ops)
    "Counter({'aten.linear': 1})"

    Args:
        module: The module, in eval mode.
        inputs: Positional example inputs; their values matter.
        expect: Rules that must fire, such as ``"fuse-linear"``, and ops that must be in the result,
            such as ``"qfuse.linear"`` (names with a dot): one, or several. With a mapping, how
            often; 0 is never.
        kwargs: Keyword example inputs.
        dynamic_shapes: As for ``torch.export.export``.
        rules: Further rules of optimize.
        dialects: Further dialects, besides the built-in ones.
        cost: Prices sites; ``None`` applies every legal rewrite.

    Raises:
        AssertionError: A check failed; the message says what differs, and where.
        QfuseError: The module cannot be captured, or a rule breaks its contract.
    """
    expect = (expect,) if isinstance(expect, str) else expect
    rules = (rules,) if isinstance(rules, ScheduledRules) else rules
    dialects = (dialects,) if isinstance(dialects, Dialect) else dialects
    source = capture(module, tuple(inputs), kwargs, dynamic_shapes=dynamic_shapes)
    caller = Caller(source.signature)
    flat = caller.check(caller.bind(tuple(inputs), dict(kwargs or {})))
    program = clone(source)
    checker = SiteChecker(program, flat)
    normal = normalize(
        program, RewriteContext("normalize", cost, checker=checker), (*BUILTIN, *dialects)
    )
    before = clone(normal)
    after = optimize(normal, RewriteContext("optimize", cost, checker=checker), added=rules)
    assert_nothing_undone(after)
    found = Rewritten(after, _fired(after), _ops(after))
    _check_expected(found, expect)
    _check_bits(before, after, flat)
    verdict = ModelCheck.measure(source, flat).judge(run_flat(after.module, flat))
    assert verdict.wrong is None, (
        f"the module returns other values after optimize: {verdict.wrong}\n"
        f"  do: apply one rule at a time with qfuse.testing.assert_same_values\n{found}"
    )
    return found


def _fired(program: StageGraph) -> Counter[str]:
    return Counter(event.rule for event in program.log.of(Fired))


def _ops(program: StageGraph) -> Counter[str]:
    nodes = program.graph.nodes
    return Counter(op_name(node) for node in nodes if overload_of(node) is not None)


def _check_expected(found: Rewritten, expect: Expected) -> None:
    counts = found.ops + found.fired
    wanted: Mapping[str, int | None] = (
        dict(expect) if isinstance(expect, Mapping) else dict.fromkeys(expect)
    )
    for name, count in wanted.items():
        if counts[name] == count or (count is None and counts[name]):
            continue
        times = "at least once" if count is None else f"{count} times"
        is_op = "." in name
        kind, others = ("op", found.ops) if is_op else ("rule", found.fired)
        have = ", ".join(f"{n} {c}" for n, c in sorted(others.items())) or "none"
        why = "" if is_op else _misses(found.graph, name)
        raise AssertionError(
            f"the {kind} {name!r} was expected {times}, and is there {counts[name]} times\n"
            f"  there are: {have}\n{why}{found}"
        )


def _misses(program: StageGraph, rule: str) -> str:
    """Return why a rule did not fire, one line per node."""
    misses = [miss for miss in program.log.of(Missed) if miss.rule == rule]
    if not misses:
        return f"  {rule} was not tried, or refused at the root of its pattern\n"
    return "".join(f"  {rule} at {miss.at}: {miss.reason} ({miss.code})\n" for miss in misses)


def _check_bits(before: StageGraph, after: StageGraph, inputs: Sequence[torch.Tensor]) -> None:
    """Compare by bits if every rule of optimize that fired is exact."""
    classes = {e.exactness for e in after.log.of(Fired) if e.stage == "optimize"}
    if classes - {Exactness.EXACT}:
        return
    pairs = zip(*(run_fixed_order(g, inputs, dense=True) for g in (before, after)), strict=True)
    for index, (old, new) in enumerate(pairs):
        if isinstance(old, torch.Tensor) and not equal_but_for_nan(old, new):
            names = ", ".join(sorted({e.rule for e in after.log.of(Fired)}))
            raise AssertionError(
                f"output {index} has other bits, though all rules are exact: "
                f"{describe_difference(old, new)}\n  fired: {names}\n{to_text(after.graph)}"
            )
