"""The protocol of worker processes, spoken with toys."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qfuse_bench.harness import process
from qfuse_bench.harness.process import Job, Lifeline, Worker, WorkerError
from qfuse_bench.harness.worker import Inputs

FACTORY = "tests.support.bench.toys:build"
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _children_find_the_toys(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = (ROOT, ROOT / "src", ROOT / "benchmarks")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))


@pytest.fixture
def example() -> Inputs:
    return (torch.randn(3, 4),), {"shift": torch.randn(4)}


def job(kind: str, **arguments: object) -> Job:
    return Job(FACTORY, {"kind": kind, **arguments}, threads=1)


@pytest.fixture
def honest(example: Inputs) -> Iterator[Worker]:
    with Worker(job("honest", pause=0.01), example) as worker:
        yield worker


def test_it_does_what_it_is_told(honest: Worker, example: Inputs) -> None:
    (x,), kwargs = example
    other: Inputs = ((x + 1,), kwargs)

    first, second = honest.answers([example, other])
    seconds = honest.time_block(4)

    assert torch.equal(first[0], x * 2 + kwargs["shift"])
    assert torch.equal(second[0], (x + 1) * 2 + kwargs["shift"])
    assert len(first) == len(second) == 1
    assert len(seconds) == 4
    assert all(0.01 <= s < 5 for s in seconds)
    assert honest.facts == {"said": "hello"}
    assert honest.state() == {"report": [1, 2]}
    assert honest.build_seconds >= 0.01


@pytest.mark.thorough
def test_inputs_are_prepared_and_memory_is_counted(example: Inputs) -> None:
    (x,), kwargs = example
    with Worker(job("half"), example) as fat, Worker(job("honest"), example) as lean:
        (answer,) = fat.answers([example])
        grown = fat.memory().resident - lean.memory().resident
        peak = fat.memory().peak

    assert torch.allclose(answer[0], x.bfloat16().float() * 2 + kwargs["shift"], atol=0.1)
    # It holds 64 MiB more than one that holds nothing; processes differ by a little besides.
    assert 48 << 20 < grown < 96 << 20
    assert peak is None or peak > 64 << 20


def test_threads_are_the_same_for_all() -> None:
    assert process._environment(3)["OMP_NUM_THREADS"] == "3"


@pytest.mark.thorough
def test_one_that_cannot_be_built_says_why(example: Inputs) -> None:
    with pytest.raises(WorkerError, match=r"^ValueError: the toy has no wheels$"):
        Worker(job("unbuildable"), example)


@pytest.mark.thorough
def test_one_that_dies_says_how_and_stays_dead(example: Inputs) -> None:
    with Worker(job("crash"), example) as worker:
        for _ in range(2):
            with pytest.raises(WorkerError, match="SIGKILL"):
                worker.time_block(1)


@pytest.mark.thorough
def test_one_that_hangs_is_ended_and_nothing_stays_behind(example: Inputs) -> None:
    before = threading.active_count()
    with Worker(job("honest", pause=0.05), example) as worker:
        with pytest.raises(WorkerError, match=r"^not done after"):
            worker._ask({"do": "time", "calls": 10_000}, limit=0.5)
        folder = Path(worker._folder.name)
        running = worker._process

    assert running.returncode is not None
    assert not folder.exists()
    assert threading.active_count() <= before, "others may end meanwhile, none may be left"


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """What is read from it ends when the last process that holds it open is gone."""
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_one_that_builds_ends_when_its_line_is_cut(example: Inputs, pipe: Path) -> None:
    lifeline, said = Lifeline(), list[str]()

    def build() -> None:
        with pytest.raises(WorkerError) as raised:
            Worker(job("stuck", pipe=str(pipe)), example, lifeline)
        said.append(str(raised.value))

    builder = threading.Thread(target=build)
    builder.start()
    with pipe.open() as read:
        assert read.read(8) == "building"
        lifeline.cut()
        assert read.read() == ""
    builder.join()
    assert said == ["killed by SIGKILL"]


PARENT = """
import signal, sys, torch
from qfuse_bench.harness.comparison import Comparison, Competitor
from qfuse_bench.harness.process import Job, Worker

example, pipe = ((torch.zeros(3, 4),), {"shift": torch.zeros(4)}), sys.argv[1]

class Quiet:
    def say(self, text): pass
    def advance(self): pass

def alone():
    with Worker(Job("tests.support.bench.toys:build", {"kind": "stuck", "pipe": pipe}, 1), example):
        pass

def compared():
    stuck = Competitor("stuck", "tests.support.bench.toys:build", {"kind": "stuck", "pipe": pipe})
    with Comparison([example], "stuck", 1, Quiet()) as contest:
        contest.enter([stuck])

# A shell starts what runs in the background with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
globals()[sys.argv[2]]()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["alone", "compared"])
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_parent(
    kind: str, sent: signal.Signals, pipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(pipe), kind], stderr=subprocess.PIPE, text=True
    )
    with pipe.open() as read:
        assert read.read(8) == "building"
        parent.send_signal(sent)
        # Of the worker and of what it started.
        assert read.read() == ""
    _, said = parent.communicate()
    assert parent.returncode == -sent
    assert ("KeyboardInterrupt" in said) == (sent == signal.SIGINT)
    assert not list(tmp_path.glob("qfuse-bench-*"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "exit status 3"),
        ("noise", "exit status 3"),
        (
            "Traceback (most recent call last):\n  File x\n    f()\nKeyError: 'a'\n",
            "KeyError: 'a'",
        ),
        (
            (
                "Traceback (most recent call last):\n  File x\nValueError: inner\n\n"
                "During handling, another:\n\nTraceback (most recent call last):\n  File y\n"
                "qfuse.Error: what is wrong\n  at: here\n"
            ),
            "qfuse.Error: what is wrong",
        ),
    ],
)
def test_the_last_error_is_the_reason(text: str, expected: str) -> None:
    assert process._last_error(text, 3) == expected
