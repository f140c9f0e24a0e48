"""One run of a pass over a copy of a graph: spelled canonically, rewritten, spelled back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from qfuse.cost import CostModel
from qfuse.ir.events import Missed
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.graph.stage_graph import CapturedGraph, StageGraph
from qfuse.ir.movement.registry import movement_of
from qfuse.ir.ops import library as ops
from qfuse.ir.stages.verify import StageSpec, verify_node
from qfuse.normalize.importers.dialect import Dialect, rules_of
from qfuse.optimize.merge.cse import Combine
from qfuse.passes.outcome import PASS_STAGE, SPELL_STAGE, on_the_way
from qfuse.passes.own_outputs import own_outputs
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import Edit, RewriteContext
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.prelude import Node, OpOverload
from qfuse.rewrite.rewriter import RULE_META, origins

_ANY = StageSpec(own=(*ops.CANONICAL, *ops.FUSED), kernels=True)

Snapshot = dict["Node", tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be done to a graph, whatever part of it.

    Attributes:
        run: Rewrites a graph in the canonical spelling.
        about: The rules that count; what others do without them is not kept.
        dialects: The dialects that the graph may speak.
        back: Whether to spell in the source's dialect what the pass made.
        cost: Prices what is legal; ``None`` does all of it.
        assume_equal: Whether parameters without values are taken as equal.
    """

    run: Callable[[StageGraph, RewriteContext], object]
    about: Collection[str]
    dialects: Sequence[Dialect]
    back: bool
    cost: CostModel | None
    assume_equal: bool


@dataclass(slots=True)
class Attempt:
    """A rewritten copy, and what was done to it.

    Attributes:
        program: The copy.
        counts: How often each rule did what the pass is about.
        needed: Names of the caller's nodes that the changes are made of.
        stranded: Names of the caller's nodes whose dialect cannot say what became of them.
        misses: Why it cannot.
    """

    program: CapturedGraph
    counts: Counter[str] = field(default_factory=Counter)
    needed: frozenset[str] = frozenset()
    stranded: frozenset[str] = frozenset()
    misses: tuple[Missed, ...] = ()


def attempt(source: CapturedGraph, work: Work, scope: frozenset[str] | None) -> Attempt:
    """Do ``work`` to a copy of ``source``, as far as it is about the nodes of ``scope``."""
    program = clone(source)
    known: dict[str, OpOverload] = {}
    for node in program.graph.nodes:
        op = overload_of(node)
        if op is not None:
            known[node.name] = op

    def context(stage: str, within: frozenset[str] | None = scope) -> RewriteContext:
        return RewriteContext(
            stage, work.cost, strict=False, scope=within, assume_equal=work.assume_equal
        )

    normalizing = replace(context("normalize"), raise_model_errors=True)
    apply_rules(program, rules_of(work.dialects), normalizing)
    before: Snapshot = {node: origins(node) for node in program.graph.nodes}
    within = context(PASS_STAGE)
    work.run(program, within)
    done = Attempt(program)
    # What the pass is about, and not only on the way there.
    substance = [e for e in within.edits if e.rule in work.about and not on_the_way(e)]
    done.counts = Counter(edit.rule for edit in substance)
    if not done.counts:
        return done
    done.needed = _needed(before, program, within.edits, substance)
    if work.back:
        missed: list[Missed] = []
        for dialect in work.dialects:
            if dialect.spell is not None:
                own = _names(known, dialect)
                spelled = apply_rules(program, dialect.spell(known), context(SPELL_STAGE, own))
                missed += spelled.missed
        done.stranded = _stranded(program, known, work.dialects)
        # Why the dialect could not spell something, as far as that was in the way.
        done.misses = tuple(missed) if done.stranded else ()
    own_outputs(program)
    program.graph.lint()
    for node in program.graph.nodes:
        verify_node(node, _ANY)
    return done


def _needed(
    before: Snapshot, program: CapturedGraph, edits: Sequence[Edit], substance: Sequence[Edit]
) -> frozenset[str]:
    """Return the caller's nodes that were rewritten, and what leads to them."""
    combined = dict(pair for edit in edits if edit.rule == Combine.name for pair in edit.replaced)
    kept = {combined.get(edit.anchor.node) for edit in substance}
    names: set[str] = set()
    made = [node for node in program.graph.nodes if node not in before or node.name in kept]
    leading = _leading(made)
    for node in leading:
        names.update(origins(node))
    left, now = {node.name for node in leading}, set(program.graph.nodes)
    for node, origin in before.items():
        if node.op == "get_attr":
            continue  # Equal numbers that are one constant now change nothing for their readers.
        # One that was combined matters if the one that stands for it now does.
        if node not in now and (node.name not in combined or combined[node.name] in left):
            names.update(origin)
    return frozenset(names)


def _leading(nodes: Sequence[Node]) -> set[Node]:
    """Return nodes, and the movements and quantization on the way to them."""
    seen, stack = set(nodes), list(nodes)
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in seen and _leads(source):
                seen.add(source)
                stack.append(source)
    return seen


def _leads(node: Node) -> bool:
    """Whether a node is on the way from what computes to what was changed."""
    op = overload_of(node)
    if op is None:
        return node.op == "call_function" and RULE_META in node.meta
    return op.namespace == "qfuse" or RULE_META in node.meta or movement_of(node) is not None


def _names(known: Mapping[str, OpOverload], dialect: Dialect) -> frozenset[str] | None:
    """Return the caller's nodes that speak a dialect; plain ATen is everybody's."""
    if not dialect.namespaces:
        return None
    return frozenset(name for name, op in known.items() if op.namespace in dialect.namespaces)


def _stranded(
    program: CapturedGraph, known: Mapping[str, OpOverload], dialects: Sequence[Dialect]
) -> frozenset[str]:
    """Return the caller's nodes of which something canonical is left that was to be spelled."""
    able = {name for d in dialects if d.spell is not None for name in d.namespaces}
    left: set[str] = set()
    for node in program.graph.nodes:
        op = overload_of(node)
        if op is None or op.namespace != "qfuse" or RULE_META not in node.meta:
            continue
        names = origins(node)
        if any(name in known and known[name].namespace in able for name in names):
            left.update(names)
    return frozenset(left)
