"""Check a dialect on example graphs: nothing of it remains, and no bit changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch.fx import Node

from qfuse.ir.events import Missed
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.normalize.builtin import BUILTIN
from qfuse.normalize.importers.dialect import Dialect, rules_of
from qfuse.testing.source import Source, assert_same_bits, fired

SourceExample = Callable[[Source], Node | Sequence[Node]]
"""Adds inputs, constants and calls to a source, and returns the outputs."""


@dataclass(frozen=True, slots=True)
class DialectCoverage:
    """What a dialect did to its examples.

    Attributes:
        fired: How often each of its rules fired.
        refused: Per example with ops that stay, the op and the reason.
    """

    fired: Counter[str]
    refused: tuple[tuple[str, str, str], ...]

    def __str__(self) -> str:
        lines = [f"{name}: fired {count}" for name, count in sorted(self.fired.items())]
        lines += [f"{example}: {op} stays: {why}" for example, op, why in self.refused]
        return "\n".join(lines)


def check_dialect(
    dialect: Dialect, *examples: SourceExample, refuses: Sequence[SourceExample] = ()
) -> DialectCoverage:
    """Check a dialect on example graphs.

    Its names are unique beside those of the built-in dialects; in each example, every op of its
    namespaces is translated, and every output keeps its bits, dtype and strides; every rule fires
    in some example; what it must refuse stays as it is, with a reason.

    >>> def add(source: Source) -> Node:
    ...     return source.b.call(torch.ops.aten.add.Tensor, source.arg(torch.ones(2)), 1)
    >>> print(check_dialect(Dialect("none", list), add))
    <BLANKLINE>

    Args:
        dialect: The dialect.
        *examples: Functions that build a source graph: each gets a new :class:`Source`.
        refuses: Examples with an op that the dialect must leave as it is.

    Raises:
        AssertionError: A check failed; the message says what differs, and where.
        ExtensionError: The dialect does not declare what it must, or a name clashes.
    """
    dialects = (*BUILTIN, dialect)
    rules_of(dialects)
    own = {rule.name for rule in rules_of([dialect])}
    counts: Counter[str] = Counter()
    for example in examples:
        normal = _normalize(example, dialects)
        counts.update(name for name in fired(normal) if name in own)
        left = _left(normal, dialect)
        assert not left, (
            f"{_name(example)}: {left[0].target} was not translated: "
            f"{_why(normal, left[0], dialect) or _no_reason(left[0], own)}\n"
            "  do: extend the rule, or give the example in `refuses` if it has no canonical form\n"
            f"{to_text(normal.graph)}"
        )
    idle = sorted(own - counts.keys())
    assert not idle, (
        f"these rules fired in no example: {', '.join(idle)}\n"
        f"  do: add an example for each; those that fired: {', '.join(sorted(counts)) or 'none'}"
    )
    return DialectCoverage(counts, tuple(_refused(e, dialect) for e in refuses))


def _normalize(example: SourceExample, dialects: Sequence[Dialect]) -> NormalGraph:
    source = Source()
    made = example(source)
    outs = [made] if isinstance(made, Node) else made
    is_right = isinstance(outs, (list, tuple)) and all(isinstance(out, Node) for out in outs)
    assert is_right, f"{_name(example)} returned {made!r}\n  do: return the nodes of the outputs"
    return assert_same_bits(source, *outs, dialects=dialects)


def _refused(example: SourceExample, dialect: Dialect) -> tuple[str, str, str]:
    normal = _normalize(example, (*BUILTIN, dialect))
    left = _left(normal, dialect)
    assert left, (
        f"{_name(example)}: every op was translated, though the dialect should refuse one\n"
        f"{to_text(normal.graph)}"
    )
    why = _why(normal, left[0], dialect)
    assert why, (
        f"{_name(example)}: {left[0].target} stays without a reason\n"
        "  do: raise RefusedError in the rule, or name the op in the `limits` of the dialect"
    )
    return _name(example), str(left[0].target), why


def _left(normal: NormalGraph, dialect: Dialect) -> list[Node]:
    """Return the calls of ops of the dialect's namespaces."""
    nodes = [(node, overload_of(node)) for node in normal.graph.nodes]
    return [node for node, op in nodes if op is not None and op.namespace in dialect.namespaces]


def _why(normal: NormalGraph, node: Node, dialect: Dialect) -> str:
    """Return why an op stays: the refusal that came closest, or the dialect's limit."""
    misses = [miss for miss in normal.log.of(Missed) if miss.anchor.node == node.name]
    if misses:
        closest = max(misses, key=lambda miss: miss.progress)
        return f"{closest.rule}: {closest.reason}"
    namespace, _, name = str(node.target).partition(".")
    return dialect.limits.get(f"{namespace}::{name.removesuffix('.default')}", "")


def _no_reason(node: Node, rules: Collection[str]) -> str:
    if not rules:
        return "the dialect has no rules"
    return f"no rule says why ({', '.join(sorted(rules))}); is {node.target} one of their anchors?"


def _name(example: SourceExample) -> str:
    return getattr(example, "__name__", repr(example))
