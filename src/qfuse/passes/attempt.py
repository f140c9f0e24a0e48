"""One run of a pass on a copy of a graph: import to canonical ops, rewrite, export back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from qfuse.cost import CostModel
from qfuse.ir.events import Missed
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.graph.stage_graph import RULE_META, CapturedGraph, StageGraph
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
from qfuse.rewrite.rewriter import origins

_ANY = StageSpec(own=(*ops.CANONICAL, *ops.FUSED), kernels=True)

Snapshot = dict["Node", tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class RewriteTask:
    """The rewrite of a pass, independent of the part of the graph.

    Attributes:
        run: Rewrites a graph of canonical ops.
        about: The rules of the pass; changes by other rules alone are discarded.
        dialects: The dialects that the graph may use.
        back: Whether to write the results of the pass in the source's dialect.
        cost: Decides which legal rewrites pay; ``None`` does all of them.
        assume_equal: Whether parameters without values are assumed to be equal.
    """

    run: Callable[[StageGraph, RewriteContext], object]
    about: Collection[str]
    dialects: Sequence[Dialect]
    back: bool
    cost: CostModel | None
    assume_equal: bool


@dataclass(slots=True)
class Attempt:
    """A rewritten copy, and the changes.

    Attributes:
        program: The copy.
        counts: How often each rule of the pass fired.
        needed: Names of the caller's nodes that the changes depend on.
        stranded: Names of the caller's nodes whose dialect cannot express the result.
        misses: The reasons.
    """

    program: CapturedGraph
    counts: Counter[str] = field(default_factory=Counter)
    needed: frozenset[str] = frozenset()
    stranded: frozenset[str] = frozenset()
    misses: tuple[Missed, ...] = ()


def attempt(source: CapturedGraph, work: RewriteTask, scope: frozenset[str] | None) -> Attempt:
    """Run ``work`` on a copy of ``source``, restricted to the nodes of ``scope``."""
    program = clone(source)
    # Rules replace nodes, so what the caller called is recorded first, by name.
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
    # Rules of the pass only, not those that prepared for them.
    substance = [e for e in within.edits if e.rule in work.about and not on_the_way(e)]
    done.counts = Counter(edit.rule for edit in substance)
    # Normalizing alone is no change that the caller asked for.
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
        # The reasons why the dialect could not express a result that was needed.
        done.misses = tuple(missed) if done.stranded else ()
    own_outputs(program)
    program.graph.lint()
    for node in program.graph.nodes:
        verify_node(node, _ANY)
    return done


def _needed(
    before: Snapshot, program: CapturedGraph, edits: Sequence[Edit], substance: Sequence[Edit]
) -> frozenset[str]:
    """Return the caller's nodes that were rewritten, and the nodes that lead to them."""
    combined = dict(pair for edit in edits if edit.rule == Combine.name for pair in edit.replaced)
    # A rewrite at a node that was combined happened at its replacement.
    kept = {combined.get(edit.anchor.node) for edit in substance}
    names: set[str] = set()
    made = [node for node in program.graph.nodes if node not in before or node.name in kept]
    leading = _leading(made)
    for node in leading:
        names.update(origins(node))
    now = set(program.graph.nodes)
    rewritten = {node.name for node in before if node not in now and node.name not in combined}
    needed = {node.name for node in leading} | rewritten
    for node, origin in before.items():
        if node.op == "get_attr":
            continue  # Deduplicated constants do not change their users.
        # A combined node is needed if its replacement is, which may have been rewritten since.
        if node not in now and combined.get(node.name, node.name) in needed:
            names.update(origin)
    return frozenset(names)


def _leading(nodes: Sequence[Node]) -> set[Node]:
    """Return the nodes, and the movement and quantization ops that lead to them."""
    seen, stack = set(nodes), list(nodes)
    while stack:
        # The run within the scope matches only if the ops that lead to its matches are canonical
        # too.
        for source in stack.pop().all_input_nodes:
            if source not in seen and _leads(source):
                seen.add(source)
                stack.append(source)
    return seen


def _leads(node: Node) -> bool:
    """Whether a node is a movement, a qfuse op, or was created by a rule."""
    op = overload_of(node)
    if op is None:
        return node.op == "call_function" and RULE_META in node.meta
    return op.namespace == "qfuse" or RULE_META in node.meta or movement_of(node) is not None


def _names(known: Mapping[str, OpOverload], dialect: Dialect) -> frozenset[str] | None:
    """Return the caller's nodes of a dialect; plain ATen is shared by all."""
    if not dialect.namespaces:
        return None
    return frozenset(name for name, op in known.items() if op.namespace in dialect.namespaces)


def _stranded(
    program: CapturedGraph, known: Mapping[str, OpOverload], dialects: Sequence[Dialect]
) -> frozenset[str]:
    """Return the caller's nodes whose canonical ops could not be written in their dialect."""
    able = {name for d in dialects if d.spell is not None for name in d.namespaces}
    left: set[str] = set()
    for node in program.graph.nodes:
        op = overload_of(node)
        # A canonical op that the caller wrote is in its own dialect, and need not be written back.
        if op is None or op.namespace != "qfuse" or RULE_META not in node.meta:
            continue
        names = origins(node)
        if any(name in known and known[name].namespace in able for name in names):
            left.update(names)
    return frozenset(left)
