"""A time counts only for right answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Self, cast

import pytest
import torch
from tests.support.bench import toys

from qfuse_bench.harness._torch_api import float_leaves
from qfuse_bench.harness.comparison import SANE_SQNR, Comparison, Competitor, Verdict
from qfuse_bench.harness.memory import Memory
from qfuse_bench.harness.process import Job, Lifeline, Worker, WorkerError
from qfuse_bench.harness.progress import Silent
from qfuse_bench.harness.worker import Inputs, time_calls

FACTORY = "tests.support.bench.toys:build"


class Here:
    """Stands in for a worker, in this process: a contender that dies raises instead."""

    build_seconds = 0.5
    built = Memory(1 << 20, 2 << 20)

    def __init__(self, job: Job, example: Inputs, lifeline: Lifeline) -> None:
        del lifeline
        self.closed = False
        self.example = example
        with self._dying():
            self.subject = toys.build(job.arguments, example)
            self._call(example)
        self.facts = self.subject.facts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _dying(self) -> Iterator[None]:
        assert not self.closed
        try:
            yield
        except (ValueError, ChildProcessError) as error:
            raise WorkerError(str(error)) from error

    def _call(self, inputs: Inputs) -> list[torch.Tensor]:
        args, kwargs = self.subject.prepare(inputs)
        return float_leaves(self.subject.call(*args, **kwargs))

    def time_block(self, calls: int) -> list[float]:
        with self._dying():
            return time_calls(self.subject.call, self.subject.prepare(self.example), calls)

    def answers(self, inputs: list[Inputs]) -> list[list[torch.Tensor]]:
        with self._dying():
            return [self._call(one) for one in inputs]

    def memory(self) -> Memory:
        return Memory(3 << 20, None)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def inputs() -> list[Inputs]:
    return [((torch.randn(3, 4),), {"shift": torch.randn(4)}) for _ in range(2)]


def toy(kind: str) -> Competitor:
    return Competitor(kind, FACTORY, {"kind": kind, "in_process": True})


FLOAT = replace(toy("honest"), name="float")


def held_here(inputs: list[Inputs], watch: Silent) -> Comparison:
    return Comparison(
        inputs, "float", 1, watch, cast("Callable[[Job, Inputs, Lifeline], Worker]", Here)
    )


class Steps(Silent):
    """Counts the steps."""

    count = 0

    def advance(self) -> None:
        self.count += 1


def test_right_contenders_are_timed_and_others_are_not(inputs: list[Inputs]) -> None:
    kinds = ("honest", "half", "garbage", "wrong-later", "unbuildable", "crash")
    steps = Steps()
    with held_here(inputs, steps) as contest:
        contest.enter([FLOAT, *map(toy, kinds)])
        entries = contest.run(3, "toys")

    verdicts = {name: entry.verdict for name, entry in entries.items()}
    assert verdicts == {
        "float": Verdict.OK,
        "honest": Verdict.OK,
        "half": Verdict.OK,
        "garbage": Verdict.WRONG,
        "wrong-later": Verdict.WRONG,
        "unbuildable": Verdict.FAILED,
        "crash": Verdict.FAILED,
    }
    assert [name for name, entry in entries.items() if entry.time] == ["float", "honest", "half"]
    assert steps.count == len(kinds) + 1 + 3


def test_what_was_seen_is_told(inputs: list[Inputs]) -> None:
    with held_here(inputs, Silent()) as contest:
        contest.enter([FLOAT, *map(toy, ("honest", "half", "garbage", "unbuildable"))])
        entries = contest.run(3, "toys")

    honest, half = entries["honest"], entries["half"]
    assert honest.sqnr == float("inf")
    assert half.sqnr is not None
    assert SANE_SQNR < half.sqnr < 80
    assert honest.time is not None
    assert len(honest.time.rounds) == 3
    assert honest.memory is not None
    assert honest.memory.resident > 1 << 20
    assert honest.facts == {"said": "hello"}
    # The garbage was fast, but that is nowhere to be read as a time.
    assert entries["garbage"].series is not None
    assert entries["garbage"].time is None
    assert "dB" in entries["garbage"].reason
    assert "no wheels" in entries["unbuildable"].reason


def test_far_below_the_quantized_model_itself_is_wrong(inputs: list[Inputs]) -> None:
    with held_here(inputs, Silent()) as contest:
        # bf16 is some 45 dB from the float model. That is enough, but not if the quantized
        # model itself has 100.
        near = Competitor("near", FACTORY, {"kind": "near"}, timed=False)
        contest.enter([FLOAT, near, toy("half"), replace(toy("half"), name="beside", like="near")])
        entries = contest.run(1, "toys")

    assert entries["half"].verdict is Verdict.OK
    assert entries["beside"].verdict is Verdict.WRONG


def test_a_model_of_few_bits_may_have_a_faint_signal(inputs: list[Inputs]) -> None:
    def off(name: str, factor: float, like: str | None = None, *, timed: bool = True) -> Competitor:
        return Competitor(name, FACTORY, {"kind": "scaled", "factor": factor}, like, timed)

    with held_here(inputs, Silent()) as contest:
        contest.enter([FLOAT, off("eager", 1.5, timed=False)])  # 6 dB
        contest.enter(
            [
                *(off("alone", 1.5), off("alike", 1.5, "eager")),
                *(off("half-way", 1.65, "eager"), off("beyond", 1.8, "eager")),  # 3.7 and 1.9 dB
            ]
        )
        entries = contest.run(1, "toys")

    assert {name: entry.verdict for name, entry in entries.items()} == {
        "float": Verdict.OK,
        "eager": Verdict.OK,
        "alone": Verdict.WRONG,
        "alike": Verdict.OK,
        "half-way": Verdict.OK,
        "beyond": Verdict.WRONG,
    }


def test_who_leaves_is_gone_and_the_others_stay(inputs: list[Inputs]) -> None:
    with held_here(inputs, Silent()) as contest:
        contest.enter([FLOAT, toy("half"), toy("honest")])
        assert set(contest.run(1, "all")) == {"float", "half", "honest"}
        contest.leave(["half", "never was"])

        assert contest.worker("half") is None
        contest.enter([toy("garbage")])
        entries = contest.run(1, "the rest")
        assert set(entries) == {"float", "honest", "garbage"}
        assert entries["garbage"].verdict is Verdict.WRONG
        last = contest.worker("honest")

    assert cast("Here", last).closed


def test_without_the_float_model_nothing_is_judged(inputs: list[Inputs]) -> None:
    broken = pytest.raises(WorkerError, match="float: the toy has no wheels")
    with held_here(inputs, Silent()) as contest, broken:
        contest.enter([replace(toy("unbuildable"), name="float"), toy("honest")])


def test_one_for_answers_only_is_not_timed(inputs: list[Inputs]) -> None:
    with held_here(inputs, Silent()) as contest:
        contest.enter([FLOAT, replace(toy("half"), timed=False)])
        entries = contest.run(2, "toys")

    assert entries["half"].verdict is Verdict.OK
    assert entries["half"].series is None
    assert entries["float"].series is not None
