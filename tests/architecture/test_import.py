"""``import qfuse`` is light and leaves the process as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.source import PACKAGE, write_tree

HEAVY = ("openvino", "torch._dynamo", "torch._inductor", "torchao", "transformers")

# Run in a fresh process: the state before and after, and the heavy packages that came in between.
# Fetching every public name counts as importing, or a lazy module would pass by doing nothing.
PROBE = f"""
import json, logging, os, sys, warnings
import torch

def state():
    return {{
        "threads": torch.get_num_threads(),
        "interop threads": torch.get_num_interop_threads(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "quantized engine": torch.backends.quantized.engine,
        "random state": torch.random.get_rng_state().tolist(),
        # sympy, which torch.fx brings in, has a filter for its own deprecations.
        "warning filters": [repr(f) for f in warnings.filters if "sympy" not in repr(f)],
        "log handlers": [repr(h) for h in logging.getLogger().handlers],
        "environment": dict(os.environ),
        "recursion limit": sys.getrecursionlimit(),
    }}

def loaded():
    return {{name for name in {HEAVY!r} if name in sys.modules}}

before, there = state(), loaded()
from qfuse import *
after, come = state(), loaded() - there
changed = {{key: [before[key], after[key]] for key in before if before[key] != after[key]}}
print(json.dumps({{"heavy": sorted(come), "changed": changed}}))
"""


def probe(source: Path) -> dict[str, Any]:
    """What importing the qfuse of the folder ``source`` does to a fresh process."""
    result = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert result.stderr == ""
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.slow
def test_import_is_light_and_changes_nothing() -> None:
    assert probe(PACKAGE.parent) == {"heavy": [], "changed": {}}


@pytest.mark.slow
def test_import_registers_the_ops() -> None:
    """A program that was saved with them is read after ``import qfuse``."""
    script = "import torch, qfuse; print(torch.ops.qfuse.linear)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "qfuse.linear\n"


MEDDLING = """
import os, warnings
import torch
torch.set_grad_enabled(False)
torch.rand(1)
os.environ["OMP_WAIT"] = "1"
warnings.simplefilter("ignore")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "heavy", "changed"),
    [
        ("import torch._dynamo", {"torch._dynamo"}, set()),
        (MEDDLING, set(), {"grad mode", "random state", "environment", "warning filters"}),
    ],
    ids=["heavy", "meddling"],
)
def test_a_heavy_or_meddling_import_is_found(
    tmp_path: Path, text: str, heavy: set[str], changed: set[str]
) -> None:
    found = probe(write_tree(tmp_path, {"qfuse/__init__.py": text}))

    assert heavy <= set(found["heavy"])
    assert changed <= set(found["changed"])
