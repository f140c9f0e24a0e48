"""The table shows what each entry point merges."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.inductor.test_merge import Three, quantized
from tests.support.frozen_inductor import freeze_report
from torch import nn

from qfuse.capture import capture
from qfuse.cost import CostModel, CostProfile
from qfuse.ir.events import Fired
from qfuse.kernels import KernelLibrary
from qfuse.passes import MergeLinears
from qfuse.pipeline import Pipeline
from qfuse.targets import Target
from qfuse_bench.report.markdown import replace_section

PAGE = Path(__file__).resolve().parents[2] / "docs" / "entry-points.md"
KINDS = {
    "float": "float",
    "int8, activations per token": "int8-dynamic",
    "int8, weights only": "int8-weight",
    "4 bits in groups, int8 activations": "int8-dynamic-int4",
    "4 bits in groups, weights only": "int4-weight",
    "float8, weights only": "fp8-weight",
    "int8 static, by PT2E": "static",
}


def model_of(kind: str, x: torch.Tensor) -> nn.Module:
    model = Three().eval()
    if kind != "static":
        return quantized(model, kind)
    from qfuse.zoo import recipes  # noqa: PLC0415 - brings torchao

    return recipes.quantize(model, "w8a8-static", (x,), {}, None, [((x,), {})]).model


def by_compile(model: nn.Module, x: torch.Tensor) -> bool:
    target, cost = Target.for_testing(), CostModel(CostProfile.pinned())
    pipeline = Pipeline(target, cost, KernelLibrary(False, "test"))
    log = pipeline.rewrite(capture(model, (x,), None)).log
    return any(event.rule == "merge-linears" for event in log.of(Fired))


def by_passes(model: nn.Module, x: torch.Tensor) -> bool:
    program = torch.export.export(model, (x,)).run_decompositions({})
    return "merge-linears" in MergeLinears()(program.module()).fired


def by_options(model: nn.Module, x: torch.Tensor) -> bool:
    return freeze_report(model, x).fired["merge-linears"] == 1


def by_options_unfrozen(model: nn.Module, x: torch.Tensor) -> bool:
    return bool(freeze_report(model, x, freezing=False).fired)


def table() -> str:
    names = ("`qfuse.compile`", "`qfuse.passes`", "`inductor_options`", "the same, not frozen")
    lines = [f"| linears | {' | '.join(names)} |", "|---|---|---|---|---|"]
    entries: list[Any] = [by_compile, by_passes, by_options, by_options_unfrozen]
    for name, kind in KINDS.items():
        x = torch.randn(32, 64)
        cells = ["merged" if entry(model_of(kind, x), x) else "separate" for entry in entries]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_table_says_what_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFUSE_CACHE_DIR", str(tmp_path))
    text = PAGE.read_text(encoding="utf-8")
    written = replace_section(text, "entry-points", table())
    if os.environ.get("QFUSE_WRITE_DOCS"):
        PAGE.write_text(written, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == written
