"""The wheel works in an environment that holds what it declares, and nothing else.

torch and the other dependencies are not installed again: the environment sees those of this
interpreter, but only the distributions that the wheel's requirements lead to.
"""

import importlib.metadata
import os
import re
import subprocess
import sysconfig
import venv
from pathlib import Path

import click
import pytest
from packaging.requirements import Requirement

from qfuse import __version__
from qfuse.cli import main
from tests.kernels.test_wheel import needs_packaging, python, wheel

MODEL = """
import torch

def small():
    return torch.nn.Linear(8, 8).eval(), (torch.ones(2, 8),)
"""

pytestmark = [pytest.mark.slow, needs_packaging]


def requirements(metadata: importlib.metadata.PackageMetadata) -> list[str]:
    """Names of what a distribution needs here, without its extras."""
    parsed = [Requirement(text) for text in metadata.get_all("Requires-Dist") or []]
    return [r.name for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]


def closure(names: list[str]) -> dict[str, importlib.metadata.Distribution]:
    """The installed distributions that ``names`` lead to."""
    found: dict[str, importlib.metadata.Distribution] = {}
    queue = list(names)
    while queue:
        name = re.sub(r"[-_.]+", "-", queue.pop()).lower()
        if name not in found:
            found[name] = importlib.metadata.distribution(name)
            queue += requirements(found[name].metadata)
    return found


def expose(distributions: dict[str, importlib.metadata.Distribution], to: Path) -> None:
    """Link the packages of some distributions into a folder of their own."""
    to.mkdir()
    for distribution in distributions.values():
        tops = {file.parts[0] for file in distribution.files or []}
        for top in tops - {"..", "__pycache__"}:
            source = Path(str(distribution.locate_file(top)))
            if source.exists() and not (to / top).exists():
                (to / top).symlink_to(source)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of an environment in which the wheel is installed."""
    root = tmp_path_factory.mktemp("installed")
    built = wheel(root / "dist", QFUSE_WHEEL_KERNELS="")
    assert built.returncode == 0, built.stderr
    (file,) = (root / "dist").iterdir()
    venv.create(root / "env", with_pip=False, symlinks=True)
    scripts = Path(sysconfig.get_path("scripts", "venv", {"base": str(root / "env")}))
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(root / "env")}))
    installed = python(
        "-m", "pip", "--python", str(scripts / "python"), "install", "--no-deps", "--no-index",
        str(file),
    )  # fmt: skip
    assert installed.returncode == 0, installed.stderr
    (own,) = importlib.metadata.distributions(name="qfuse", path=[str(site)])
    expose(closure(requirements(own.metadata)), root / "dependencies")
    (site / "dependencies.pth").write_text(str(root / "dependencies"))
    return scripts


def call(environment: Path, *args: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the installed command, with nothing else on Python's path than ``folder``."""
    variables = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"}
    return subprocess.run(
        [str(environment / "qfuse"), *args],
        env=variables, cwd=folder, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip


def test_undeclared_packages_are_hidden(environment: Path) -> None:
    found = subprocess.run(
        [environment / "python", "-c", "import torch, sys; print(sys.path); import pytest"],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip

    assert "No module named 'pytest'" in found.stderr
    assert str(Path(sysconfig.get_path("purelib"))) not in found.stdout


@pytest.mark.parametrize("command", ["", *main.list_commands(click.Context(main))])
def test_every_command_starts(environment: Path, tmp_path: Path, command: str) -> None:
    told = call(environment, *([command] if command else []), "--help", folder=tmp_path)

    assert told.returncode == 0, told.stderr
    assert f"Usage: qfuse {command}".rstrip() in told.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--version",), __version__),
        (("doctor",), "qfuse doctor"),
        (("explain", "model:small", "--no-own-kernels"), "explained, not compiled"),
        (("compile", "model:small", "--no-own-kernels", "--backend=eager"), "eager"),
        (("explain", "model:small", "--no-own-kernels", "--quantize=w8a16"), "Quantized ops"),
    ],
)
def test_commands_work(environment: Path, tmp_path: Path, args: tuple[str, ...], says: str) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    told = call(environment, *args, folder=tmp_path)

    assert told.returncode == 0, told.stderr
    assert says in told.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("explain", "llama"), "qfuse[zoo]"),
        (("bench",), "pip install ./benchmarks"),
        (("demo",), "pip install ./benchmarks"),
    ],
)
def test_what_needs_another_package_says_so(
    environment: Path, tmp_path: Path, args: tuple[str, ...], says: str
) -> None:
    told = call(environment, *args, folder=tmp_path)

    assert told.returncode == 1
    assert says in told.stderr
    assert "Traceback" not in told.stderr
