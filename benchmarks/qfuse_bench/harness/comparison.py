"""Compare contenders on the same inputs: build them, check their answers, then time them.

A time is valid only with correct answers. Answers are checked before and after the rounds, since a
contender that overwrites its state may be correct only in its first call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

import torch

from qfuse_bench.harness.machine import IdleWait
from qfuse_bench.harness.measure import Series, measure
from qfuse_bench.harness.memory import Memory
from qfuse_bench.harness.process import Job, Lifeline, Worker, WorkerError
from qfuse_bench.harness.progress import Watch
from qfuse_bench.harness.stats import sqnr
from qfuse_bench.harness.worker import Inputs

SANE_SQNR = 10.0
"""In dB. Below this the noise in the answers is a third of the signal: they are wrong, whatever
was quantized."""

_SLACK = 6.0  # dB below the quantized model itself: twice its noise
# Four bits for weights that are drawn at random leave less than a sane signal, however right the
# arithmetic is: then a contender may be so much worse, and no nearer to garbage than this.
_FAINT_SLACK = 3.0
_FAINTEST = 3.0
_BUILDERS = 2  # compiling is mostly work of one thread


class Verdict(StrEnum):
    """The outcome of a contender."""

    OK = "ok"
    WRONG = "WRONG"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Competitor:
    """A contender.

    Attributes:
        name: The name in tables.
        factory: See :class:`qfuse_bench.harness.process.Job`.
        arguments: Likewise.
        like: Name of the entrant that runs the same quantized model without any compiler. One that
            is far worse than that computes something else, even if it is not garbage.
        timed: Whether it is timed, or only provides answers.
    """

    name: str
    factory: str
    arguments: Mapping[str, Any]
    like: str | None = None
    timed: bool = True


@dataclass(frozen=True, slots=True)
class Entry:
    """One contender and its measurements.

    Attributes:
        name: The name in tables.
        verdict: Whether its time is valid.
        reason: Why it is not; "" if it is.
        series: Its times; ``None`` if it was not timed.
        sqnr: The worst of its answers, in dB against the float model.
        memory: Resident memory after the rounds, and the peak of the rounds.
        build_seconds: Time to build and compile it, including its first call.
        build_peak: Peak memory of the build, in bytes.
        facts: Facts that it reports.
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
        """The times, if they are valid."""
        return self.series if self.verdict is Verdict.OK else None


class Comparison:
    """Holds one process per contender. Use it as a context manager.

    Args:
        inputs: The first one is timed; answers are compared on all of them.
        reference: Name of the entrant that all answers are compared with, the float model.
        threads: OpenMP threads of every contender.
        watch: Receives progress.
        start: Makes the process of a contender.
    """

    def __init__(
        self,
        inputs: Sequence[Inputs],
        reference: str,
        threads: int,
        watch: Watch,
        start: Callable[[Job, Inputs, Lifeline], Worker] = Worker,
    ) -> None:
        self._inputs = list(inputs)
        self._reference = reference
        self._threads = threads
        self._watch = watch
        self._start = start
        self._lifeline = Lifeline()
        self._truth: list[torch.Tensor] | None = None
        self._competitors: dict[str, Competitor] = {}
        self._workers: dict[str, Worker] = {}
        self._entries: dict[str, Entry] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            # Interrupted, perhaps: nobody waits for what they are doing.
            self._lifeline.cut()
        self.leave(list(self._workers))
        self._lifeline.cut()

    def worker(self, name: str) -> Worker | None:
        """Return the live process of a contender, for other queries than times."""
        return self._workers.get(name)

    def enter(self, competitors: Sequence[Competitor]) -> None:
        """Build contenders, two at a time, and check their answers.

        Raises:
            WorkerError: The reference failed, so answers cannot be checked.
        """
        self._competitors |= {competitor.name: competitor for competitor in competitors}
        with ThreadPoolExecutor(_BUILDERS) as pool:
            try:
                for competitor, built in zip(
                    competitors, pool.map(self._build, competitors), strict=True
                ):
                    self._admit(competitor.name, built)
            except BaseException:
                # The pool waits for its threads, and they for builds of minutes.
                self._lifeline.cut()
                raise
        if self._truth is None:
            self._truth = self._find_truth()
        for competitor in competitors:
            if competitor.name in self._workers:
                self._judge(competitor.name)

    def leave(self, names: Sequence[str]) -> None:
        """Stop contenders and discard their results."""
        for name in names:
            worker = self._workers.pop(name, None)
            if worker is not None:
                worker.close()
            self._entries.pop(name, None)
            self._competitors.pop(name, None)

    def run(self, rounds: int, what: str, patience: float = 0.0) -> dict[str, Entry]:
        """Time all live contenders, and check their answers and memory afterwards.

        Args:
            rounds: How many.
            what: The progress text.
            patience: Seconds to wait, in all, for other programs to leave the cores alone.
        """
        self._watch.say(f"timing {what}")
        timed = {n: w for n, w in self._workers.items() if self._competitors[n].timed}
        series = measure(
            timed,
            rounds,
            before_round=IdleWait(patience).wait,
            after_round=self._watch.advance,
        )
        for name, times in series.items():
            if times.failed:
                self._fail(name, times.failed)
                continue
            self._entries[name] = replace(self._entries[name], series=times)
            self._judge(name)
            self._weigh(name)
        return dict(self._entries)

    def _build(self, competitor: Competitor) -> Worker | WorkerError:
        self._watch.say(f"building {competitor.name}")
        job = Job(competitor.factory, competitor.arguments, self._threads)
        try:
            return self._start(job, self._inputs[0], self._lifeline)
        except WorkerError as error:
            return error
        finally:
            self._watch.advance()

    def _admit(self, name: str, built: Worker | WorkerError) -> None:
        if isinstance(built, WorkerError):
            self._entries[name] = Entry(name, Verdict.FAILED, str(built))
            return
        self._workers[name] = built
        self._entries[name] = Entry(
            name,
            Verdict.OK,
            build_seconds=built.build_seconds,
            build_peak=built.built.peak,
            facts=built.facts,
        )

    def _find_truth(self) -> list[torch.Tensor]:
        if self._reference not in self._workers:
            entry = self._entries.get(self._reference)
            raise WorkerError(f"{self._reference}: {entry.reason if entry else 'it is not there'}")
        return _flat(self._workers[self._reference].answers(self._inputs))

    def _floor(self, name: str) -> float:
        """Return the least SQNR in dB that is accepted."""
        competitor = self._competitors[name]
        if not competitor.timed:
            return _FAINTEST  # it shows the effect of quantization alone
        like = self._entries.get(competitor.like or "")
        own = None if like is None else like.sqnr
        if own is None:
            return SANE_SQNR
        return max(min(SANE_SQNR, own - _FAINT_SLACK), own - _SLACK, _FAINTEST)

    def _judge(self, name: str) -> None:
        assert self._truth is not None, "contenders enter before they are judged"
        try:
            found = sqnr(self._truth, _flat(self._workers[name].answers(self._inputs)))
        except WorkerError as error:
            self._fail(name, str(error))
            return
        entry = self._entries[name]
        worst = found if entry.sqnr is None else min(found, entry.sqnr)
        entry = replace(entry, sqnr=worst)
        floor = self._floor(name)
        if worst < floor:
            reason = f"its answers are wrong: {worst:.1f} dB, and {floor:.1f} expected"
            entry = replace(entry, verdict=Verdict.WRONG, reason=reason)
        self._entries[name] = entry

    def _weigh(self, name: str) -> None:
        if name not in self._workers:
            return
        try:
            memory = self._workers[name].memory()
        except WorkerError as error:
            self._fail(name, str(error))
        else:
            self._entries[name] = replace(self._entries[name], memory=memory)

    def _fail(self, name: str, reason: str) -> None:
        self._workers.pop(name).close()
        self._entries[name] = replace(
            self._entries[name], verdict=Verdict.FAILED, reason=reason, series=None
        )


def _flat(results: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for result in results for tensor in result]
