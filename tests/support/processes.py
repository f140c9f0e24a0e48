"""Python in a process of its own, for what a process does once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import qfuse


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code with this qfuse; the caller looks at how it ended."""
    source = str(Path(qfuse.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": source, **env},
        capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
