"""Find the block that a program repeats, and where it is best cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from qfuse.backends.aliases import replaced_node, root_of
from qfuse.backends.blocks.cost import CutCost, Price, hinted_bytes
from qfuse.backends.blocks.period import Run, periodic_runs
from qfuse.backends.blocks.text import Occurrence, loose_text, read_occurrence
from qfuse.backends.key import constant_digest
from qfuse.backends.layout import size_hint
from qfuse.backends.prepare import Program
from qfuse.ir.graph.schema import arguments
from qfuse.ir.refusal import Refusal

LEAST = 3
"""Fewer equal blocks are not worth a library of their own."""

INLINED = 8
"""Constants of up to so many elements may become a part of the code."""

_RUNS, _CUTS = 4, 16


@dataclass(frozen=True, slots=True)
class Blocks:
    """Consecutive parts of a program that do the same with other constants.

    Attributes:
        before: The calls before the first block.
        occurrences: The blocks.
        after: The calls after the last block.
        outputs: Positions in a block of the values that some block or what follows reads.
        lifted: Positions among the constants of a block of small ones that differ. Compilers make
            small constants a part of the code, so that these have to be inputs.
        fused: Bytes of values in one block that loops of the next read, with which they could have
            been fused.
        broadcast: Bytes of values that the blocks read and that are broadcast: each is stored in
            full in every call, and read in full by every block.
        made: Bytes of the values that one block computes.
    """

    before: tuple[Node, ...]
    occurrences: tuple[Occurrence, ...]
    after: tuple[Node, ...]
    outputs: tuple[int, ...]
    lifted: tuple[int, ...]
    fused: int
    broadcast: int = 0
    made: int = 0


def find_blocks(program: Program, least: int = LEAST) -> Blocks | Refusal:
    """Return the block that covers most of ``program``; it is not changed.

    Args:
        program: The program.
        least: How often a block has to occur.

    Refuses: programs that write their state or an input, draw random numbers, or do not repeat
    themselves; blocks through which an alias passes.
    """
    reason = _unfit(program)
    if reason is not None:
        return Refusal(reason)
    calls = [node for node in program.module.graph.nodes if _is_step(program, node)]
    runs = periodic_runs([loose_text(program, node) for node in calls], least)
    if not runs:
        return Refusal(f"no part of the graph occurs {least} times in a row")
    found: Blocks | Refusal = Refusal("its parts look alike and do not do the same")
    for run in runs[:_RUNS]:
        found = _cut(program, calls, run, least)
        if isinstance(found, Blocks):
            return found
    return found


def _unfit(program: Program) -> str | None:
    """Return why a program must stay whole."""
    if program.state or program.written or program.late:
        names = [program.names[p] for p in (*program.written, *(p for _, p in program.late))]
        which = ", ".join(names[:1]) or program.names[-1]
        return f"the model keeps state or writes its inputs ({which})"
    # Those of inner graphs too.
    graphs = (m.graph for m in program.module.modules() if isinstance(m, GraphModule))
    for node in (node for graph in graphs for node in graph.nodes):
        if not isinstance(op := node.target, OpOverload):
            continue
        # Attention has the tag for the sake of its dropout.
        random = torch.Tag.nondeterministic_seeded in op.tags
        if random and arguments(node).get("dropout_p") != 0.0:
            return f"{op} draws random numbers"
        if op._schema.is_mutable:  # noqa: SLF001
            return f"{op} writes its arguments"
        if op is torch.ops.aten.as_strided.default:
            return f"{op} reads the memory of its operand by number"
    return None


def _is_step(program: Program, node: Node) -> bool:
    """Whether a node computes tensors; sizes are computed anew in each part."""
    return node.op == "call_function" and not isinstance(
        program.values.get(node), (torch.SymInt, int)
    )


def _reads(program: Program, user: Node) -> bool:
    """Whether a user needs the value itself, and not only its size."""
    return user.op == "output" or _is_step(program, user)


def _cut(program: Program, calls: Sequence[Node], run: Run, least: int) -> Blocks | Refusal:
    """Cut a run where that costs least."""
    cost = CutCost(program, calls)
    priced: list[tuple[Price, int, int]] = []
    for begin in range(run.begin, run.begin + run.period):
        times = (run.end - begin) // run.period
        price = cost.at(begin, begin + run.period) if times >= least else None
        if price is not None:
            priced.append((price, -times, begin))
    found: Blocks | Refusal = Refusal("every cut crosses a value that is not a tensor")
    for price, _, begin in sorted(priced)[:_CUTS]:
        found = _cut_at(program, calls, Run(run.period, begin, run.end), least, price[0])
        if isinstance(found, Blocks):
            break
    return found


def _cut_at(
    program: Program, calls: Sequence[Node], run: Run, least: int, fused: int
) -> Blocks | Refusal:
    """Cut a run at its begin."""
    parts = [
        calls[run.begin + i * run.period : run.begin + (i + 1) * run.period]
        for i in range(run.times)
    ]
    first, occurrences = _equal([read_occurrence(program, part) for part in parts])
    if len(occurrences) < least:
        return Refusal("its parts look alike and do not do the same")
    begin = run.begin + first * run.period
    outputs = _outputs(program, occurrences)
    for one in occurrences:
        local = set(one.nodes)
        for position in outputs:
            node = one.nodes[position]
            if not isinstance(program.values.get(node), torch.Tensor):
                return Refusal(f"a block would return {node.name}, which is not a tensor")
            if root_of(node, replaced_node) not in local:
                return Refusal(f"a block would return {node.name}, an alias of what it reads")
    return Blocks(
        before=tuple(calls[:begin]),
        occurrences=tuple(occurrences),
        after=tuple(calls[begin + len(occurrences) * run.period :]),
        outputs=outputs,
        lifted=_lifted(program, occurrences),
        fused=fused,
        broadcast=_broadcast(program, occurrences),
        made=sum(map(hinted_bytes, _tensors(program, occurrences[0].nodes))),
    )


def _equal(read: Sequence[Occurrence]) -> tuple[int, Sequence[Occurrence]]:
    """Return the longest stretch of occurrences with equal texts, and its begin."""
    best, begin = (0, 0), 0
    for index in range(len(read)):
        if read[index].text != read[begin].text:
            begin = index
        best = max(best, (index + 1 - begin, begin), key=lambda found: found[0])
    return best[1], read[best[1] : best[1] + best[0]]


def _outputs(program: Program, occurrences: Sequence[Occurrence]) -> tuple[int, ...]:
    """Return the positions of values that are read outside of their own block."""
    found: set[int] = set()
    for one in occurrences:
        local = set(one.nodes)
        for position, node in enumerate(one.nodes):
            if any(user not in local and _reads(program, user) for user in node.users):
                found.add(position)
    return tuple(sorted(found))


def _broadcast(program: Program, occurrences: Sequence[Occurrence]) -> int:
    """Return the bytes of values from outside that are broadcast, and are stored in full."""
    outside = dict.fromkeys(node for one in occurrences for node in one.outside)
    return sum(map(hinted_bytes, filter(_is_broadcast, _tensors(program, outside))))


def _tensors(program: Program, nodes: Iterable[Node]) -> list[torch.Tensor]:
    values = (program.values.get(node) for node in nodes)
    return [value for value in values if isinstance(value, torch.Tensor)]


def _is_broadcast(value: torch.Tensor) -> bool:
    return any(
        size_hint(step) == 0 and size_hint(size) > 1
        for size, step in zip(value.shape, value.stride(), strict=True)
    )


def _lifted(program: Program, occurrences: Sequence[Occurrence]) -> tuple[int, ...]:
    """Return the positions of small constants that differ."""
    found: list[int] = []
    for position in range(len(occurrences[0].constants)):
        values = [program.constants[one.constants[position]] for one in occurrences]
        small = values[0].numel() <= INLINED
        if small and len({constant_digest(value) for value in values}) > 1:
            found.append(position)
    return tuple(found)
