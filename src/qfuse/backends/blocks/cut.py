"""Cut a program into what is before its blocks, one block, and what is after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from qfuse.backends.blocks.find import Blocks
from qfuse.backends.blocks.part import (
    CutError,
    make_part,
    outside_values,
    symbol_sources,
    value_of,
)
from qfuse.backends.blocks.wiring import NOWHERE, PartRun, Wiring
from qfuse.backends.layout import Layout
from qfuse.backends.prepare import Program
from qfuse.ir.refusal import Refusal


@dataclass(frozen=True, slots=True)
class CutProgram:
    """A program as parts, and how they are run.

    Attributes:
        parts: What is compiled.
        sizes: For each part the names of its sizes in conditions, and those of the whole.
        wiring: How the parts are run.
    """

    parts: tuple[Program, ...]
    sizes: tuple[dict[str, str], ...]
    wiring: Wiring


def cut_blocks(program: Program, blocks: Blocks) -> CutProgram | Refusal:
    """Cut a program, which is not changed, around and between its blocks.

    Refuses: programs of which a part has a size that does not follow from its inputs.
    """
    try:
        return _Cut(program, blocks).run()
    except CutError as error:
        return Refusal(str(error))


class _Cut:
    """State of one call of :func:`cut_blocks`."""

    def __init__(self, program: Program, blocks: Blocks) -> None:
        self._program = program
        self._blocks = blocks
        self._parts: list[Program] = []
        self._steps: list[PartRun] = []
        placeholders = list(program.module.graph.find_nodes(op="placeholder"))
        self._fed = len(placeholders)
        # The number of each value in the table: inputs first.
        self._numbers: dict[Node, int] = {node: i for i, node in enumerate(placeholders)}
        self._held: dict[int, str] = {}
        self._results: list[Node] = _results(program)

    def run(self) -> CutProgram:
        blocks = self._blocks
        inner = [node for one in blocks.occurrences for node in one.nodes]
        if blocks.before:
            self._first(blocks.before, {*inner, *blocks.after})
        self._repeated()
        # What no part makes: an input, a constant.
        rest = [n for n in self._results if self._numbers.get(n, NOWHERE) in {NOWHERE, *self._held}]
        passed = [n for n in self._results if n.op == "placeholder"]
        ends = {n: i for i, n in enumerate(dict.fromkeys((*rest, *passed)))}
        outputs: dict[Node, int] = {}
        if blocks.after or ends:
            outputs = self._last(blocks.after, list(ends))
        results = tuple(outputs.get(n, self._numbers[n]) for n in self._results)
        sizes = tuple(_renamed(self._program, part) for part in self._parts)
        return CutProgram(tuple(self._parts), sizes, self._wiring(results))

    def _first(self, nodes: Sequence[Node], users: set[Node]) -> None:
        """Add what is before the blocks, for results and for ``users``."""
        wanted = set(self._results)
        made = [n for n in nodes if n in wanted or not users.isdisjoint(n.users)]
        inputs = self._with_sources(nodes, outside_values(self._program, nodes))
        constants = _constants(self._program, nodes)
        self._parts.append(make_part(self._program, nodes, inputs, constants, made))
        self._step(inputs, constants, made)

    def _last(self, nodes: Sequence[Node], made: Sequence[Node]) -> dict[Node, int]:
        """Add what is after the blocks; return the numbers of what it returns."""
        inputs = self._with_sources(nodes, outside_values(self._program, nodes, made))
        constants = _constants(self._program, nodes, made)
        self._parts.append(make_part(self._program, nodes, inputs, constants, made))
        first = self._size
        self._numbers |= {n: first + i for i, n in enumerate(made) if n not in self._numbers}
        numbers = tuple(range(first, first + len(made)))
        self._add_step(inputs, constants, numbers)
        return dict(zip(made, numbers, strict=True))

    def _repeated(self) -> None:
        """Add the block, and a step for each occurrence."""
        blocks, program = self._blocks, self._program
        first = blocks.occurrences[0]
        kept = [i for i in range(len(first.constants)) if i not in blocks.lifted]
        sources = self._sources(first.nodes, first.outside)
        reads = _reads(program)
        part = make_part(
            program,
            first.nodes,
            [*first.outside, *(reads[first.constants[i]] for i in blocks.lifted), *sources],
            [first.constants[i] for i in kept],
            [first.nodes[i] for i in blocks.outputs],
        )
        self._parts.append(part)
        for one in blocks.occurrences:
            lifted = [reads[one.constants[i]] for i in blocks.lifted]
            for node in lifted:
                self._hold(node)
            inputs = [*one.outside, *lifted, *sources]
            constants = [one.constants[i] for i in kept]
            self._step(inputs, constants, [one.nodes[i] for i in blocks.outputs])

    def _step(self, inputs: Sequence[Node], constants: Sequence[str], made: Sequence[Node]) -> None:
        numbers = tuple(range(self._size, self._size + len(made)))
        self._numbers |= dict(zip(made, numbers, strict=True))
        self._add_step(inputs, constants, numbers)

    def _add_step(
        self, inputs: Sequence[Node], constants: Sequence[str], outputs: tuple[int, ...]
    ) -> None:
        given = tuple(self._numbers[node] for node in inputs)
        bound = {f"c{i}": name for i, name in enumerate(constants)}
        self._steps.append(PartRun(len(self._parts) - 1, given, outputs, bound))

    @property
    def _size(self) -> int:
        """How many values have a number."""
        made = [n for step in self._steps for n in step.outputs]
        return self._fed + len(self._held) + len(made)

    def _hold(self, node: Node) -> None:
        if node not in self._numbers:
            self._numbers[node] = number = self._size
            self._held[number] = str(node.target)

    def _with_sources(self, nodes: Sequence[Node], inputs: Sequence[Node]) -> list[Node]:
        return [*inputs, *self._sources(nodes, inputs)]

    def _sources(self, nodes: Sequence[Node], inputs: Sequence[Node]) -> list[Node]:
        for node in inputs:
            value_of(self._program, node)
        return symbol_sources(self._program, nodes, inputs)

    def _wiring(self, results: tuple[int, ...]) -> Wiring:
        read = {number for step in self._steps for number in step.inputs}
        orders = {
            number: Layout.of(self._program.values[node]).order
            for node, number in self._numbers.items()
            # Inputs have their layout, and results get theirs later.
            if number in read and number >= self._fed and number not in self._held
        }
        kept = read.union(results)
        steps = tuple(
            replace(step, outputs=tuple(n if n in kept else NOWHERE for n in step.outputs))
            for step in self._steps
        )
        return Wiring(self._fed, self._size, steps, orders, self._held, results)


def _results(program: Program) -> list[Node]:
    (values,) = program.module.graph.output_node().args
    assert isinstance(values, (tuple, list)), "a program returns a tuple"
    found = [value for value in values if isinstance(value, Node)]
    if len(found) != len(values):
        raise CutError("a result of the graph is not a tensor")
    return found


def _reads(program: Program) -> dict[str, Node]:
    """Return the node of each constant that reads it first."""
    found: dict[str, Node] = {}
    for node in program.module.graph.find_nodes(op="get_attr"):
        found.setdefault(str(node.target), node)
    return found


def _constants(program: Program, nodes: Sequence[Node], more: Sequence[Node] = ()) -> list[str]:
    """Return the names of the constants that ``nodes`` read, or that are among ``more``."""
    read = (*(n for node in nodes for n in node.all_input_nodes), *more)
    names = dict.fromkeys(str(n.target) for n in read if n.op == "get_attr")
    return [name for name in names if name in program.constants]


def _renamed(program: Program, part: Program) -> dict[str, str]:
    """Return the names of the sizes of a part in the whole."""
    return {size.name: program.sizes[symbol].name for symbol, size in part.sizes.items()}
