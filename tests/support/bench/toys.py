"""Contenders that a worker builds in no time: right ones, wrong ones and broken ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from qfuse_bench.harness.worker import Inputs, Subject


def build(arguments: Mapping[str, Any], example: Inputs) -> Subject:
    """Make the toy that ``arguments["kind"]`` names."""
    del example
    return TOYS[arguments["kind"]](arguments)


def _honest(arguments: Mapping[str, Any]) -> Subject:
    pause = arguments.get("pause", 0.0)

    def call(x: torch.Tensor, *, shift: torch.Tensor) -> dict[str, torch.Tensor]:
        time.sleep(pause)
        return {"y": x * 2 + shift}

    os.write(1, b"chatter that must not reach the pipe\n")
    return Subject(call, facts={"said": "hello"}, state={"report": [1, 2]})


def _garbage(arguments: Mapping[str, Any]) -> Subject:
    del arguments
    return Subject(lambda x, *, shift: torch.full_like(x + shift, 1e6))


def _wrong_later(arguments: Mapping[str, Any]) -> Subject:
    """Right at first; then it answers from what it has spoilt."""
    del arguments
    calls = 0

    def call(x: torch.Tensor, *, shift: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x * 2 + shift + (1e3 if calls > 4 else 0.0)

    return Subject(call)


def _near(arguments: Mapping[str, Any]) -> Subject:
    """Right but for the fifth digit: 100 dB."""
    del arguments
    return Subject(lambda x, *, shift: (x * 2 + shift) * (1 + 1e-5))


def _scaled(arguments: Mapping[str, Any]) -> Subject:
    """Off by a factor: 1.5 leaves 6 dB."""
    factor = float(arguments["factor"])
    return Subject(lambda x, *, shift: (x * 2 + shift) * factor)


def _unbuildable(arguments: Mapping[str, Any]) -> NoReturn:
    del arguments
    raise ValueError("the toy has no wheels")


def _crash(arguments: Mapping[str, Any]) -> Subject:
    """Ends its process at the second call."""
    calls = 0

    def call(x: torch.Tensor, *, shift: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > 1:
            if arguments.get("in_process"):
                raise ChildProcessError("killed by SIGKILL")
            os.kill(os.getpid(), signal.SIGKILL)
        return x + shift

    return Subject(call)


def _half(arguments: Mapping[str, Any]) -> Subject:
    """Takes its input in bf16, and holds on to 64 MiB."""
    del arguments
    held = torch.ones(16 << 20)

    def prepare(inputs: Inputs) -> Inputs:
        (x,), kwargs = inputs
        return (x.bfloat16(),), kwargs

    def call(x: torch.Tensor, *, shift: torch.Tensor) -> torch.Tensor:
        assert x.dtype is torch.bfloat16
        return x * 2 + shift + held[:1] - 1

    return Subject(call, prepare)


def _stuck(arguments: Mapping[str, Any]) -> NoReturn:
    """Builds forever, and so does its compiler; both hold the pipe of a file open."""
    with Path(arguments["pipe"]).open("w") as pipe:
        compiler = [sys.executable, "-c", "import signal; signal.pause()"]
        subprocess.Popen(compiler, stdin=subprocess.DEVNULL, pass_fds=(pipe.fileno(),))
        pipe.write("building")
        pipe.flush()
        while True:
            signal.pause()


TOYS: dict[str, Callable[[Mapping[str, Any]], Subject]] = {
    "honest": _honest,
    "garbage": _garbage,
    "wrong-later": _wrong_later,
    "unbuildable": _unbuildable,
    "crash": _crash,
    "stuck": _stuck,
    "half": _half,
    "near": _near,
    "scaled": _scaled,
}
