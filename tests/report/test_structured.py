"""The report is in torch's structured log, where tlparse finds it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qfuse.report import Report, structured
from qfuse.report.structured import PAGE, REPORT, log_report

PROGRAM = """
import torch, qfuse
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

model = torch.nn.Sequential(torch.nn.Linear(64, 64)).eval()
quantize_(model, Int8DynamicActivationInt8WeightConfig())
x, target = torch.randn(4, 64), qfuse.Target.for_testing(isa="avx2")
options = {"backend": "eager"}
with torch.no_grad():
    torch.compile(model, backend="qfuse", options={**options, "target": target})(x)
qfuse.compile(model, (x,), target=target, options=options)
qfuse.optimize(torch.export.export(model, (x,)), target=target)
"""


def artifacts(log: str) -> list[tuple[dict[str, Any], str]]:
    """The artifacts of qfuse in a log: the line about each, and its text."""
    found: list[tuple[dict[str, Any], list[str]]] = []
    for line in log.splitlines():
        if line.startswith("\t"):
            found[-1][1].append(line[1:])
        else:
            found.append((json.loads(line.partition("] ")[2]), []))
    ours = [(head, "\n".join(text)) for head, text in found if "artifact" in head]
    return [one for one in ours if one[0]["artifact"]["name"].startswith("qfuse")]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.own_kernels
def test_every_way_writes_the_report_and_the_page(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TORCH_TRACE": str(tmp_path)},
        capture_output=True,
        check=True,
    )
    (log,) = tmp_path.glob("*.log")
    found = artifacts(log.read_text())

    kinds = [(head["artifact"]["name"], head["artifact"]["encoding"]) for head, _ in found]
    assert kinds == [(REPORT, "json"), (PAGE, "string")] * 3
    # Those of the graph of Dynamo belong to it.
    assert [head.get("frame_id") for head, _ in found] == [0, 0, None, None, None, None]
    for (_, report), (_, page) in zip(found[::2], found[1::2], strict=True):
        assert len(Report.from_json(report).fused) == 1
        assert page.startswith("<!DOCTYPE html>")


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def listener() -> Iterator[Kept]:
    log, kept = logging.getLogger("torch.__trace"), Kept()
    log.addHandler(kept)
    yield kept
    log.removeHandler(kept)


def test_a_listener_gets_the_report(listener: Kept) -> None:
    log_report(Report(()))

    ours = [vars(record) for record in listener.records if "artifact" in vars(record)["metadata"]]
    assert [one["metadata"]["artifact"]["name"] for one in ours] == [REPORT, PAGE]
    assert Report.from_json(ours[0]["payload"]) == Report(())


def test_nothing_is_made_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(structured, "log_artifact", lambda name, *_: made.append(name))

    log_report(Report(()))

    assert made == []
