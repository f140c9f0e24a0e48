"""The steps of a compilation: what they are called, and that each second is counted once."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import qfuse
from qfuse import kernels, session
from qfuse.cost import CostProfile
from qfuse.kernels import KernelLibrary, find_kernel_compiler
from qfuse.kernels.build import build
from qfuse.targets import Target

SECONDS = 0.6


def _slow_measurement(target: Target) -> CostProfile:
    del target
    time.sleep(SECONDS)
    return CostProfile.pinned()


def _explained(steps: list[str]) -> tuple[qfuse.Report, float]:
    begin = time.perf_counter()
    report = qfuse.explain(nn.Linear(4, 4).eval(), (torch.ones(2, 4),), progress=steps.append)
    return report, time.perf_counter() - begin


def test_measuring_the_machine_is_said_and_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "measure_speeds", _slow_measurement)
    monkeypatch.setattr(session, "load_or_measure", lambda target, measure: measure(target))
    steps: list[str] = []
    report, passed = _explained(steps)

    assert "measuring the speeds of this machine (only once)" in steps
    facts = report.facts
    assert facts.setup_seconds is not None
    assert facts.capture_seconds is not None
    assert facts.plan_seconds is not None
    assert facts.setup_seconds >= SECONDS
    assert facts.setup_seconds + facts.capture_seconds + facts.plan_seconds <= passed


def test_compiling_the_kernels_is_said_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(say: object = None) -> KernelLibrary:
        assert callable(say)
        say("compiling the kernels (only once): 1 of 2 files")
        time.sleep(SECONDS)
        return KernelLibrary(False, "a test")

    monkeypatch.setattr(kernels, "load", slow)
    steps: list[str] = []
    report, _ = _explained(steps)
    assert "compiling the kernels (only once): 1 of 2 files" in steps
    assert report.facts.setup_seconds is not None
    assert report.facts.setup_seconds >= SECONDS


@pytest.mark.own_kernels
def test_the_compiler_of_kernels_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = find_kernel_compiler()
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    monkeypatch.setenv("QFUSE_CACHE_DIR", str(tmp_path / "cache"))
    for number in range(2):
        (tmp_path / f"{number}.cpp").write_text(f"int answer{number}() {{ return {number}; }}")
    steps: list[str] = []
    with caplog.at_level(logging.WARNING):
        build(compiler, sources=tmp_path, say=steps.append)
    assert [step.rpartition(": ")[2] for step in steps] == ["1 of 2 files", "2 of 2 files"]
    assert not caplog.messages

    with caplog.at_level(logging.WARNING):
        build(compiler, sources=tmp_path, rebuild=True)
        build(compiler, sources=tmp_path)
    (message,) = caplog.messages
    assert message.startswith("compiling qfuse's kernels (only once): the ops: 2 files")


def test_later_compilations_have_no_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "load", lambda *_: KernelLibrary(False, "a test"))
    report, _ = _explained([])
    assert report.facts.setup_seconds is None
    assert "setup" not in report.facts.rows()


class Draws(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) + torch.rand(4)


def test_the_random_state_is_that_of_the_caller() -> None:
    before = torch.get_rng_state()
    fast = qfuse.compile(Draws().eval(), (torch.ones(4),), options={"backend": "eager"})
    assert torch.equal(torch.get_rng_state(), before)
    fast(torch.ones(4))
    assert not torch.equal(torch.get_rng_state(), before)
