"""``qfuse doctor --bundle``: one zip with what a maintainer would ask for."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
import torch

from qfuse import kernels
from qfuse.cases import REPRO_VARIABLE
from qfuse.cost import profile_path
from qfuse.extensions import list_extensions
from qfuse.ir.errors import OptionsError
from qfuse.ir.files import parse_json, replaceable_file
from qfuse.plans import package_versions
from qfuse.targets import Target, cache_directory, diagnose

VARIABLES = (
    *("QFUSE_CACHE_DIR", "QFUSE_ISA", REPRO_VARIABLE, "QFUSE_SANITIZE"),
    *("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "OMP_WAIT_POLICY", "MKL_NUM_THREADS"),
    *("KMP_AFFINITY", "KMP_BLOCKTIME", "GOMP_CPU_AFFINITY", "LD_PRELOAD", "LD_LIBRARY_PATH"),
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "CXX"),
    *("TORCHINDUCTOR_FREEZING", "TORCHINDUCTOR_CACHE_DIR", "TORCH_COMPILE_DEBUG", "TORCH_LOGS"),
)
"""The environment variables that matter, and the only ones that are read."""

_PACKAGES = ("numpy", "safetensors", "transformers", "onnxruntime", "openvino", "triton")
_REPORT = "report.json"


def bundle_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of ``doctor`` that write a bundle."""
    file = click.Path(path_type=Path, dir_okay=False)
    bundle = click.option(
        "--bundle", type=file, metavar="FILE", help="write a zip for an issue, and list its files"
    )
    report = click.option(
        "--report", type=file, metavar="FILE", help="add a report that --json wrote to the bundle"
    )
    return bundle(report(command))


def show_bundle(file: Path | None, report: Path | None) -> None:
    """Write a bundle, and list what it holds.

    Raises:
        OptionsError: There is a report without a bundle, or a file cannot be read or written.
    """
    if file is None:
        raise OptionsError("--report needs --bundle", fix="add --bundle FILE.zip")
    for name, what in write_bundle(file, report):
        click.echo(f"{name:17} {what}")
    click.echo(f"written to {file}; look through it before you attach it to an issue")


def write_bundle(file: Path, report: Path | None) -> list[tuple[str, str]]:
    """Write a bundle; the home folder is written as ``~`` in all of it.

    Returns:
        The name of each file in it, with what it holds.

    Raises:
        OptionsError: The report cannot be read, or the bundle cannot be written.
    """
    target = Target.detect()
    parts: dict[str, tuple[str, object]] = {
        "versions.json": ("Python, system and packages", _versions(target)),
        "target.json": ("CPU, caches, threads, compiler, operators", target.to_dict()),
        "doctor.json": ("findings of qfuse doctor", [asdict(f) for f in diagnose(target)]),
        "kernels.json": ("qfuse's own kernels, and why they are missing", _kernels()),
        "extensions.json": ("packages that extend qfuse", [asdict(e) for e in list_extensions()]),
        "environment.json": (f"{len(VARIABLES)} named variables, no others", _environment()),
        "cache.json": ("sizes in the cache folder, and the measured speeds", _cache(target)),
        "torch.txt": ("how torch was built", torch.__config__.show()),
    }
    if report is not None:
        parts[_REPORT] = ("the report, with lines of your source", _read_report(report))
    held = [(name, what) for name, (what, _) in parts.items()]
    listed = ("what this bundle holds", dict(held))
    _write(file, {"contents.json": listed, **parts})
    return [("contents.json", listed[0]), *held]


def _write(file: Path, parts: Mapping[str, tuple[str, object]]) -> None:
    home = str(Path.home())
    place = replaceable_file(file)
    try:
        handle, draft = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
    except OSError as error:
        raise OptionsError(f"--bundle {file} cannot be written: {error.strerror}") from error
    try:
        with (
            os.fdopen(handle, "wb") as raw,
            zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as made,
        ):
            for name, (_, value) in parts.items():
                text = value if isinstance(value, str) else json.dumps(value, indent=2, default=str)
                # A root folder as home would replace every slash.
                hidden = text.replace(home, "~") if len(home) > 1 else text
                made.writestr(name, hidden + "\n")
        Path(draft).replace(place)
    except BaseException:
        # Also on KeyboardInterrupt: no half-written file stays behind.
        Path(draft).unlink(missing_ok=True)
        raise


def _versions(target: Target) -> dict[str, str]:
    found = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "executable": sys.executable,
        **package_versions(target),
    }
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _kernels() -> dict[str, object]:
    library = kernels.load()
    described = None
    if library.path is not None:
        described = asdict(kernels.read_description(library.path))
    return {**asdict(library), "path": str(library.path), "description": described}


def _environment() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in VARIABLES}


def _cache(target: Target) -> dict[str, object]:
    root, sizes = cache_directory(), dict[str, dict[str, int]]()
    for path in sorted(root.rglob("*")) if root.is_dir() else ():
        if path.is_file():
            entry = sizes.setdefault(path.relative_to(root).parts[0], {"files": 0, "bytes": 0})
            entry["files"] += 1
            entry["bytes"] += path.stat().st_size
    profile = profile_path(target)
    speeds = profile.read_text(encoding="utf-8") if profile.is_file() else None
    return {"folder": str(root), "entries": sizes, "speeds": speeds}


def _read_report(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
        parse_json(text)
    except (OSError, ValueError) as error:
        raise OptionsError(
            f"--report {path} cannot be read: {error}",
            fix="write one with qfuse explain MODEL --json FILE",
        ) from error
    return text
