"""Packs compiled kernels into a wheel, if ``QFUSE_WHEEL_KERNELS`` names a folder of them.

    qfuse build-kernels --into kernels
    QFUSE_WHEEL_KERNELS=kernels python -m pip wheel --no-deps .

Without the variable the wheel is pure Python, and kernels are compiled on first use.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_VARIABLE = "QFUSE_WHEEL_KERNELS"
_INSIDE = Path("qfuse", "kernels", "prebuilt")


class PrebuiltKernels(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the libraries, and says in the wheel's tag for which platform they are."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Change what goes into the wheel."""
        del version
        named = os.environ.get(_VARIABLE)
        if not named:
            return
        folder = Path(self.root, named)
        libraries = sorted(folder.glob("*/*.so"))
        if not libraries:
            raise ValueError(
                f"{_VARIABLE}={named} holds no kernels; fill it with `qfuse build-kernels --into`"
            )
        for library in libraries:
            for path in (library, library.with_suffix(".json")):
                inside = _INSIDE / path.parent.name / path.name
                build_data["force_include"][str(path)] = str(inside)
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        build_data["pure_python"] = False
