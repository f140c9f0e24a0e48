"""Inductor's caches: hit by a second process, which still has its reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import json, warnings
warnings.simplefilter("ignore")
import torch
import torch._inductor.config as config
from torch import nn
from torch._dynamo.utils import counters
import qfuse

class Two(nn.Module):
    def __init__(self, n, bare):
        super().__init__()
        self.a, self.b, self.bare = nn.Linear(16, n), nn.Linear(16, 4), bare

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        return (a, b) if self.bare else (a.relu(), b.sigmoid())

def run(width, frozen, way):
    torch._dynamo.reset()
    torch.manual_seed(0)
    # C++ is generated for one model only: it takes seconds to compile.
    model, x = Two(width, bare=width > 8).eval(), torch.randn(3, 16)
    hits, before = counters["inductor"]["fxgraph_cache_hit"], len(qfuse.reports())
    with torch.no_grad():
        expected = model(x)
        # Inductor never caches a graph with weights that oneDNN packed.
        with config.patch(freezing=frozen, **{"cpp.vec_isa_ok": True, "cpp.weight_prepack": False}):
            if way == "options":
                found = torch.compile(model, options=qfuse.inductor_options())(x)
            else:
                with qfuse.inductor_passes():
                    found = torch.compile(model)(x)
    for a, b in zip(expected, found):
        torch.testing.assert_close(a, b)
    return {
        "hits": counters["inductor"]["fxgraph_cache_hit"] - hits,
        "reports": [r.to_dict() for r in qfuse.reports()[before:]],
    }

# Every model has a width of its own, so that none finds what another left.
cases = [(frozen, way) for frozen in (True, False) for way in ("options", "passes")]
print(json.dumps([run(8 + i, *case) for i, case in enumerate(cases)]))
"""
CASES = [(frozen, way) for frozen in (True, False) for way in ("options", "passes")]


def run(folder: Path) -> list[dict[str, Any]]:
    """Compile the models in a process of their own."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "QFUSE_CACHE_DIR": str(folder / "qfuse"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert result.returncode == 0, result.stderr
    found: list[dict[str, Any]] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """What two processes saw, one after the other, which have empty caches to share."""
    folder = tmp_path_factory.mktemp("caches")
    return [run(folder), run(folder)]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(("frozen", "way"), CASES)
def test_a_second_process_hits_the_cache_and_has_its_report(
    processes: list[list[dict[str, Any]]], way: str, *, frozen: bool
) -> None:
    first, second = (found[CASES.index((frozen, way))] for found in processes)
    assert (first["hits"], second["hits"]) == (0, 1)
    (one,), (other,) = first["reports"], second["reports"]
    assert one["fired"] == other["fired"] == ({"merge-linears": 1} if frozen else {})
    assert one["events"] == other["events"]
    assert one["events"]
    assert "compiled" in one["facts"]["graph"]
    assert "cache" in other["facts"]["graph"]
