"""The controlling side of a worker: start it, send commands, and report why it died."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from qfuse_bench.harness.memory import Memory
from qfuse_bench.harness.worker import Inputs

_WORKER = (sys.executable, "-m", "qfuse_bench.harness.worker")
_BUILD_SECONDS = 900.0
_COMMAND_SECONDS = 300.0
_QUIT_SECONDS = 10.0
_LONGEST_REASON = 200


class WorkerError(Exception):
    """A contender could not be built, or died. The message is one line for a table."""


@dataclass(frozen=True, slots=True)
class Job:
    """The contender of a worker.

    Attributes:
        factory: ``module:function`` that makes a :class:`qfuse_bench.harness.worker.Subject` of the
            arguments and the example inputs.
        arguments: JSON values for it.
        threads: OpenMP threads of the process, the same for all that are compared.
        environment: Variables of the process, besides those of this one.
    """

    factory: str
    arguments: Mapping[str, Any]
    threads: int
    environment: Mapping[str, str] = field(default_factory=dict)


class Lifeline:
    """A pipe that ends its workers, and what they have started, when it is cut.

    The kernel cuts it when this process ends, however that happens.
    """

    def __init__(self) -> None:
        self.reading, writing = os.pipe()
        # The other end stays open: a worker that starts just now reads the end of the file.
        weakref.finalize(self, os.close, self.reading)
        self._cut = weakref.finalize(self, os.close, writing)

    def cut(self) -> None:
        """End the workers, whatever they are doing; a second time does nothing."""
        self._cut()


class Worker:
    """A process with one contender, from its start until :meth:`close`.

    Attributes:
        facts: Facts that the contender reports.
        build_seconds: Time to build and compile it, including its first call.
        built: Memory after the build; the peak includes compiling.
    """

    def __init__(self, job: Job, example: Inputs, lifeline: Lifeline | None = None) -> None:
        """Start the process and wait until the contender is ready.

        Args:
            job: The contender.
            example: The inputs that it is built for.
            lifeline: Ends the process when it is cut; by default one of its own.

        Raises:
            WorkerError: It could not be built.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="qfuse-bench-")
        self._lifeline = lifeline or Lifeline()
        self._files = 0
        self._stderr = Path(self._folder.name) / "stderr"
        with self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                [*_WORKER, str(self._lifeline.reading), self._folder.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**_environment(job.threads), **job.environment},
                pass_fds=(self._lifeline.reading,),
                # Of its own, so that its compilers can be ended with it.
                process_group=0,
                text=True,
                encoding="utf-8",
            )
        spec = {
            "factory": job.factory,
            "arguments": dict(job.arguments),
            "threads": job.threads,
            "example": self._write([example]),
        }
        try:
            ready = self._ask(spec, _BUILD_SECONDS)
        except BaseException:
            self._kill()
            self.close()
            raise
        self.facts: dict[str, Any] = ready["facts"]
        self.build_seconds: float = ready["seconds"]
        self.built = Memory(**ready["memory"])
        self._counts_peak: bool = ready["counts_peak"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            # Interrupted, perhaps: nobody waits for what it is doing.
            self._kill()
        self.close()

    def time_block(self, calls: int) -> list[float]:
        """Return the seconds of each of ``calls`` calls on the example inputs, after a warm-up."""
        seconds: list[float] = self._ask({"do": "time", "calls": calls})["seconds"]
        return seconds

    def answers(self, inputs: Sequence[Inputs]) -> list[list[torch.Tensor]]:
        """Return, for every input, the float tensors of the result."""
        to = self._path()
        self._ask({"do": "answer", "inputs": self._write(list(inputs)), "to": str(to)})
        results: list[list[torch.Tensor]] = torch.load(to)
        to.unlink()
        return results

    def memory(self) -> Memory:
        """Return its memory, with the peak since it was built."""
        memory = Memory(**self._ask({"do": "memory"}))
        return memory if self._counts_peak else Memory(memory.resident, None)

    def state(self) -> Any:
        """Return the state of the contender, such as a report."""
        to = self._path()
        self._ask({"do": "state", "to": str(to)})
        # Safe to unpickle: written by our own child into a private folder.
        return pickle.loads(to.read_bytes())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None, "the worker was started with a pipe"
        assert self._process.stdout is not None, "the worker was started with a pipe"
        with contextlib.suppress(BrokenPipeError):  # it may be gone already
            self._process.stdin.close()
        try:
            self._process.wait(_QUIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()

    def _ask(self, command: dict[str, Any], limit: float = _COMMAND_SECONDS) -> dict[str, Any]:
        assert self._process.stdin is not None, "the worker was started with a pipe"
        assert self._process.stdout is not None, "the worker was started with a pipe"
        watch = threading.Timer(limit, self._kill)
        watch.start()
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            late = not watch.is_alive()
            watch.cancel()
        if not line:
            raise WorkerError(f"not done after {limit:.0f} s" if late else self._why_it_died())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _kill(self) -> None:
        """End the process and what it has started."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ends just now
                os.killpg(self._process.pid, signal.SIGKILL)

    def _why_it_died(self) -> str:
        code = self._process.wait()
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return _last_error(self._stderr.read_text(encoding="utf-8", errors="replace"), code)

    def _path(self) -> Path:
        self._files += 1
        return Path(self._folder.name) / f"{self._files}"

    def _write(self, inputs: list[Inputs]) -> str:
        path = self._path()
        torch.save(inputs, path)
        return str(path)


def _environment(threads: int) -> dict[str, str]:
    """Return the environment of a worker: the same for every contender."""
    # Compile in one process: the memory of a pool would not be attributed to the contender.
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _last_error(text: str, code: int) -> str:
    """Return the error of the last traceback in ``text``, as one line."""
    _, found, traceback = text.rpartition("Traceback (most recent call last):")
    for line in traceback.splitlines() if found else ():
        # The error is the first line of a traceback that is not indented.
        if line and not line[0].isspace():
            return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]}..."
    return f"exit status {code}"
