"""When a program with blocks is compiled as one package all the same, and what is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.support.graphs.lowered import aten, finish
from tests.support.graphs.repeated import gained_layer, stacked

from qfuse.backends.blocks import build, chain
from qfuse.backends.blocks.build import compile_blocks
from qfuse.backends.blocks.find import Blocks, find_blocks
from qfuse.backends.cache import CompiledCode
from qfuse.backends.eager import run_eagerly
from qfuse.backends.key import constant_digest
from qfuse.backends.prepare import Program, prepare
from qfuse.backends.runner import BackendOptions, BlockChoice
from qfuse.ir.errors import BackendError
from qfuse.ir.events import EventLog, Noted
from qfuse.ir.graph.stage_graph import LoweredGraph
from qfuse.testing.build import GraphBuilder

Made = Callable[[Program], CompiledCode]


class Outcome:
    """What a compilation with a compiler that answers at once came to."""

    def __init__(
        self, made: Made, choice: BlockChoice, graph: Callable[[], LoweredGraph] | None = None
    ) -> None:
        self.compiled: list[Program] = []
        self.told: list[str] = []
        self.log = EventLog()
        lowered = (graph or deep)()

        def compile_program(part: Program, *_: object) -> CompiledCode:
            self.compiled.append(part)
            return made(part)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "compile_program", compile_program)
            patch.setattr(build, "is_loaded", lambda: True)
            patch.setattr(chain, "is_loaded", lambda: True)
            patch.setattr(build, "DEEP", 3)
            self.runner = compile_blocks(
                prepare(lowered),
                run_eagerly(lowered),
                BackendOptions(blocks=choice),
                self.told.append,
                self.log,
            )

    @property
    def notes(self) -> list[tuple[str, bool]]:
        return [(note.text, note.warn) for note in self.log.of(Noted)]


def deep() -> LoweredGraph:
    return stacked(5, gained_layer([0.5, 1.5, 2.5, 3.5, 4.5]))


def shallow() -> LoweredGraph:
    return stacked(2, gained_layer([0.5, 1.5]))


def with_a_long_end() -> LoweredGraph:
    b = GraphBuilder()
    stream = b.arg("x", torch.float32, 3, 16)
    for number in range(3):
        stream = gained_layer([0.5, 1.5, 2.5])(b, stream, stream, number)
    for number in range(12):
        stream = b.call(aten.add.Tensor, stream, float(number))
    return finish(b, [stream])


def plain(_part: Program) -> CompiledCode:
    return CompiledCode(b"", {}, "", {}, ())


def with_a_constant_of_its_own(_part: Program) -> CompiledCode:
    return CompiledCode(b"", {"packed": torch.ones(2)}, "", {}, ())


def with_the_weight_inside(part: Program) -> CompiledCode:
    digests = {name: constant_digest(value) for name, value in part.constants.items()}
    return CompiledCode(b"", {}, "", digests, ())


def failing(_part: Program) -> CompiledCode:
    raise BackendError("the compiler ran out of registers")


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (with_a_constant_of_its_own, "the compiler made a constant of its own, packed, for one"),
        (with_the_weight_inside, "a constant became a part of the code, and differs between the"),
        (failing, "the compiler ran out of registers"),
    ],
)
@pytest.mark.parametrize("choice", [BlockChoice.AUTO, BlockChoice.ON])
def test_code_of_one_block_is_not_that_of_the_others(
    made: Made, reason: str, choice: BlockChoice
) -> None:
    outcome = Outcome(made, choice)

    assert outcome.runner is None
    # The block is the first part that is compiled: no other one is compiled in vain.
    assert len(outcome.compiled) == 1
    ((text, warn),) = outcome.notes
    assert text.startswith(f"the graph is compiled as one package: {reason}")
    assert warn is (choice is BlockChoice.ON)
    assert outcome.told[-1] == "compiling as one package instead"


def test_a_package_that_cannot_be_loaded_leaves_one_package() -> None:
    outcome = Outcome(plain, BlockChoice.AUTO)

    assert outcome.runner is None
    assert len(outcome.compiled) == 3
    assert "cannot be loaded" in outcome.notes[0][0]


@pytest.mark.parametrize("what", ["find_blocks", "cut_blocks"])
def test_a_fault_in_finding_blocks_leaves_one_package_unless_they_were_asked_for(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a node is nowhere")

    monkeypatch.setattr(build, what, fail)
    assert Outcome(plain, BlockChoice.AUTO).runner is None
    assert "which is a bug" in caplog.text
    with pytest.raises(AssertionError, match="a node is nowhere"):
        Outcome(plain, BlockChoice.ON)


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (shallow, "no part of the graph occurs 3 times in a row"),
        (with_a_long_end, "only 9 of its calls are in equal blocks"),
    ],
)
def test_few_blocks_are_not_compiled_for_themselves(
    graph: Callable[[], LoweredGraph], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG"):
        outcome = Outcome(plain, BlockChoice.AUTO, graph)

    assert not outcome.compiled
    assert not outcome.notes
    assert reason in caplog.text


@pytest.mark.parametrize(
    ("price", "reason"),
    [
        ({"fused": 64}, "each boundary between blocks would store 64 bytes that stay in a loop"),
        ({"broadcast": 9999}, "9999 bytes that the blocks read are broadcast, and would be stored"),
    ],
)
def test_blocks_that_would_slow_a_call_down_are_not_compiled_unless_asked_for(
    price: dict[str, int],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def find(program: Program, least: int) -> Blocks:
        found = find_blocks(program, least)
        assert isinstance(found, Blocks)
        return replace(found, fused=price.get("fused", 0), broadcast=price.get("broadcast", 0))

    monkeypatch.setattr(build, "find_blocks", find)
    with caplog.at_level("DEBUG"):
        outcome = Outcome(plain, BlockChoice.AUTO)

    assert not outcome.compiled
    assert reason in caplog.text
    assert Outcome(plain, BlockChoice.ON).compiled
