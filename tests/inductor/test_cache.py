"""Inductor's caches: hit by a second process, which still has its reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
import torch._inductor.config as config
from torch import nn
from torch._dynamo.utils import counters
import qfuse

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 8), nn.Linear(16, 4)

    def forward(self, x):
        return self.a(x).relu(), self.b(x).sigmoid()

torch.manual_seed(0)
frozen, way = json.loads(sys.argv[1])
model, x = Two().eval(), torch.randn(3, 16)
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
print(json.dumps({
    "hits": counters["inductor"]["fxgraph_cache_hit"],
    "reports": [r.to_dict() for r in qfuse.reports()],
}))
"""


def run(folder: Path, arguments: Sequence[Any]) -> dict[str, Any]:
    """Compile a model in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(arguments)],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "QFUSE_CACHE_DIR": str(folder / "qfuse"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("way", ["options", "passes"])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_second_process_hits_the_cache_and_has_its_report(
    tmp_path: Path, way: str, *, frozen: bool
) -> None:
    first, second = run(tmp_path, (frozen, way)), run(tmp_path, (frozen, way))
    assert (first["hits"], second["hits"]) == (0, 1)
    (one,), (other,) = first["reports"], second["reports"]
    assert one["fired"] == other["fired"] == ({"merge-linears": 1} if frozen else {})
    assert one["events"] == other["events"]
    assert one["events"]
    assert "compiled" in one["facts"]["graph"]
    assert "cache" in other["facts"]["graph"]
