"""Compilers that can link the C++ standard library into a library."""

from __future__ import annotations

import subprocess
from pathlib import Path


def has_static_libstdcxx(compiler: str) -> bool:
    """Whether it finds ``libstdc++.a``: a name that it does not find is printed as it is."""
    done = subprocess.run(
        [compiler, "-print-file-name=libstdc++.a"], capture_output=True, text=True, check=True
    )
    return Path(done.stdout.strip()).is_absolute()
