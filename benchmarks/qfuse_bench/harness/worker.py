"""A process that holds one contender and executes commands from a pipe.

One process per contender keeps contenders apart: settings of Inductor are global, caches and memory
are shared otherwise. Commands come in as JSON, one per line; so do the answers. What the contender
prints goes to stderr. A contender that fails takes the process with it, and the traceback on stderr
says why: see :mod:`qfuse_bench.harness.process` for the other end.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch

from qfuse_bench.harness._torch_api import float_leaves
from qfuse_bench.harness.memory import read_memory, reset_peak

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one call."""


def _as_they_are(inputs: Inputs) -> Inputs:
    return inputs


@dataclass(frozen=True, slots=True)
class Subject:
    """The callable that a worker measures.

    Attributes:
        call: Called with the inputs.
        prepare: Turns inputs into what ``call`` takes, outside the measured time.
        facts: Facts for the controlling process, as JSON.
        state: Anything to send by pickle on request.
    """

    call: Callable[..., Any]
    prepare: Callable[[Inputs], Inputs] = _as_they_are
    facts: dict[str, Any] = field(default_factory=dict)
    state: Any = None


def time_calls(call: Callable[..., Any], inputs: Inputs, calls: int) -> list[float]:
    """Return the seconds of each of ``calls`` calls, after one that is not counted.

    The warm-up call loads code and weights back into the caches.
    """
    args, kwargs = inputs
    call(*args, **kwargs)
    seconds = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(calls):
            begin = time.perf_counter()
            result = call(*args, **kwargs)
            seconds.append(time.perf_counter() - begin)
            del result
    finally:
        gc.enable()
    return seconds


class _Worker:
    """Answers commands about one subject."""

    def __init__(self, subject: Subject, example: Inputs) -> None:
        self._subject = subject
        self._example = subject.prepare(example)

    def time(self, calls: int) -> dict[str, Any]:
        """Time calls on the example inputs."""
        return {"seconds": time_calls(self._subject.call, self._example, calls)}

    def answer(self, inputs: str, to: str) -> dict[str, Any]:
        """Call with every input of a file and write the float tensors of the results to another."""
        results = []
        for one in torch.load(inputs):
            args, kwargs = self._subject.prepare(one)
            results.append([x.clone() for x in float_leaves(self._subject.call(*args, **kwargs))])
        torch.save(results, to)
        return {}

    def memory(self) -> dict[str, Any]:
        """Return the memory of this process."""
        return asdict(read_memory())

    def state(self, to: str) -> dict[str, Any]:
        """Write the subject's state to a file."""
        Path(to).write_bytes(pickle.dumps(self._subject.state))
        return {}


def _load(name: str) -> Callable[[dict[str, Any], Inputs], Subject]:
    module, _, function = name.partition(":")
    found: Callable[[dict[str, Any], Inputs], Subject] = getattr(
        importlib.import_module(module), function
    )
    return found


def _begin(spec: dict[str, Any]) -> tuple[_Worker, dict[str, Any]]:
    """Build the contender and call it once."""
    torch.set_num_threads(spec["threads"])
    torch.set_grad_enabled(False)
    (example,) = torch.load(spec["example"])
    begin = time.perf_counter()
    subject = _load(spec["factory"])(spec["arguments"], example)
    args, kwargs = subject.prepare(example)
    subject.call(*args, **kwargs)
    seconds = time.perf_counter() - begin
    worker = _Worker(subject, example)
    del example, args, kwargs
    built = read_memory()
    ready = {"facts": subject.facts, "seconds": seconds, "memory": asdict(built)}
    return worker, {**ready, "counts_peak": reset_peak()}


def _serve(worker: _Worker, commands: TextIO, answers: TextIO) -> None:
    for line in commands:
        command = json.loads(line)
        name = command.pop("do")
        _say(answers, getattr(worker, name)(**command))


def _say(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _end_with_parent(lifeline: int, folder: str) -> None:
    """Wait until the controlling process is gone or cuts the line, and end all of this group.

    A build takes minutes and does not look at stdin, and a compiler knows nothing of either.
    """
    os.read(lifeline, 1)
    # The controlling process, which owns the folder, may have had no time to.
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Build what the first line on stdin describes, and serve until stdin ends."""
    lifeline, folder = sys.argv[1:]
    given = (int(lifeline), folder)
    threading.Thread(target=_end_with_parent, args=given, daemon=True).start()
    # Compilers and libraries print to stdout, which would corrupt the protocol.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        worker, ready = _begin(json.loads(sys.stdin.readline()))
        _say(answers, ready)
        _serve(worker, sys.stdin, answers)


if __name__ == "__main__":
    main()
