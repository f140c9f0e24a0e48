"""Contenders on the same inputs: built one after the other, gated by their answers, then timed.

A time counts only for right answers. Answers are compared before the rounds and after them, because
a contender may be right once: what it overwrites shows in later calls.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

from qfuse.bench.machine import Patience
from qfuse.bench.measure import Series, measure
from qfuse.bench.process import Job, Worker, WorkerError
from qfuse.bench.stats import sqnr

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from qfuse.bench.memory import Memory
    from qfuse.bench.progress import Watch
    from qfuse.bench.worker import Inputs

__all__ = ["SANE_SQNR", "Contest", "Entry", "Verdict"]

SANE_SQNR = 10.0
"""In dB. Below this the noise in the answers is a third of the signal: they are wrong, whatever
was quantized."""

_SLACK = 6.0  # dB below the quantized model itself: twice its noise


class Verdict(StrEnum):
    """What became of a contender."""

    OK = "ok"
    WRONG = "WRONG"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Entry:
    """One contender and what was seen of it.

    Attributes:
        name: What tables call it.
        verdict: Whether its time counts.
        reason: Why it does not; "" if it does.
        series: Its times; nothing if it was never timed.
        sqnr: The worst of its answers, in dB against the float model.
        memory: Resident memory when its rounds were over, and the peak of the rounds.
        build_seconds: From an empty process to the end of the first call.
        build_peak: The most memory that this took, in bytes.
        facts: What it tells about itself.
    """

    name: str
    verdict: Verdict
    reason: str = ""
    series: Series | None = None
    sqnr: float | None = None
    memory: Memory | None = None
    build_seconds: float | None = None
    build_peak: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def time(self) -> Series | None:
        """The times, if they count."""
        return self.series if self.verdict is Verdict.OK else None


class Contest:
    """Holds one process per contender. Use it as a context manager.

    Args:
        inputs: The first is what is timed; answers are compared on all of them.
        threads: OpenMP threads of every contender.
        watch: Told what is going on.
        start: Makes the process of a contender.
    """

    def __init__(
        self,
        inputs: Sequence[Inputs],
        threads: int,
        watch: Watch,
        start: Callable[[Job, Inputs], Worker] = Worker,
    ) -> None:
        self._start = start
        self._inputs = list(inputs)
        self._threads = threads
        self._watch = watch
        self._stack = ExitStack()
        self._workers: dict[str, Worker] = {}
        self._entries: dict[str, Entry] = {}
        self._floors: dict[str, float] = {}
        self._reference: list[torch.Tensor] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def worker(self, name: str) -> Worker | None:
        """Return the live process of a contender, for questions besides time."""
        return self._workers.get(name)

    def answers(
        self, factory: str, arguments: Mapping[str, Any], inputs: Sequence[Inputs] | None = None
    ) -> list[list[torch.Tensor]]:
        """Return what a contender that is not timed answers to each input.

        Args:
            factory: See :class:`qfuse.bench.process.Job`.
            arguments: Likewise.
            inputs: Other inputs than those of the contest.

        Raises:
            WorkerError: It failed.
        """
        with self._start(Job(factory, arguments, self._threads), self._inputs[0]) as worker:
            return worker.answers(self._inputs if inputs is None else inputs)

    def refer_to(self, name: str) -> None:
        """Compare all answers with those of this contender, which is the float model.

        Raises:
            WorkerError: It is not there, or fails now.
        """
        if name not in self._workers:
            raise WorkerError(f"{name}: {self._entries[name].reason}")
        self._reference = _flat(self._workers[name].answers(self._inputs))
        self._judge(name)

    def enter(
        self,
        name: str,
        factory: str,
        arguments: Mapping[str, Any],
        own: Sequence[Sequence[torch.Tensor]] | None = None,
    ) -> None:
        """Build a contender and look at its answers.

        Args:
            name: What tables call it.
            factory: See :class:`qfuse.bench.process.Job`.
            arguments: Likewise.
            own: Answers of the same quantized model without any compiler. A contender that is far
                worse than these computes something else, even if it is not garbage.
        """
        self._watch.say(f"building {name}")
        try:
            worker = self._start(Job(factory, arguments, self._threads), self._inputs[0])
        except WorkerError as error:
            self._entries[name] = Entry(name, Verdict.FAILED, str(error))
            self._watch.advance()
            return
        self._stack.callback(worker.close)
        self._workers[name] = worker
        self._floors[name] = self._floor(own)
        self._entries[name] = Entry(
            name,
            Verdict.OK,
            build_seconds=worker.build_seconds,
            build_peak=worker.built.peak,
            facts=worker.facts,
        )
        self._judge(name)
        self._watch.advance()

    def leave(self, names: Sequence[str]) -> None:
        """End contenders; what was seen of them is forgotten."""
        for name in names:
            worker = self._workers.pop(name, None)
            if worker is not None:
                worker.close()
            self._entries.pop(name, None)

    def run(self, rounds: int, what: str, patience: float = 0.0) -> dict[str, Entry]:
        """Time everybody who is there, and look at the answers and the memory afterwards.

        Args:
            rounds: How many.
            what: What the user reads meanwhile.
            patience: Seconds to wait, in all, for other programs to leave the cores alone.
        """
        self._watch.say(f"timing {what}")
        series = measure(
            self._workers,
            rounds,
            before_round=Patience(patience).wait,
            after_round=self._watch.advance,
        )
        for name, times in series.items():
            if times.failed:
                self._fail(name, times.failed)
                continue
            self._entries[name] = replace(self._entries[name], series=times)
            self._judge(name)
        for name in list(self._workers):
            try:
                memory = self._workers[name].memory()
            except WorkerError as error:
                self._fail(name, str(error))
            else:
                self._entries[name] = replace(self._entries[name], memory=memory)
        return dict(self._entries)

    def _floor(self, own: Sequence[Sequence[torch.Tensor]] | None) -> float:
        """Return the least SQNR in dB that is believed."""
        if own is None or self._reference is None:
            return SANE_SQNR
        return max(SANE_SQNR, sqnr(self._reference, _flat(own)) - _SLACK)

    def _judge(self, name: str) -> None:
        if self._reference is None:
            return
        try:
            found = sqnr(self._reference, _flat(self._workers[name].answers(self._inputs)))
        except WorkerError as error:
            self._fail(name, str(error))
            return
        entry = self._entries[name]
        worst = found if entry.sqnr is None else min(found, entry.sqnr)
        entry = replace(entry, sqnr=worst)
        if worst < self._floors[name]:
            reason = f"its answers are wrong: {worst:.1f} dB, and {self._floors[name]:.1f} expected"
            entry = replace(entry, verdict=Verdict.WRONG, reason=reason)
        self._entries[name] = entry

    def _fail(self, name: str, reason: str) -> None:
        self._workers.pop(name).close()
        self._entries[name] = replace(
            self._entries[name], verdict=Verdict.FAILED, reason=reason, series=None
        )


def _flat(results: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for result in results for tensor in result]
