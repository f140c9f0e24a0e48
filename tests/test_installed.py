"""The wheel works in an environment that holds what it declares, and nothing else.

torch and the other dependencies are not installed again: the environment sees those of this
interpreter, but only the distributions that the wheel's requirements lead to.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sysconfig
import venv
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement

from qfuse import __version__, kernels
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


def installed_in(root: Path, libraries: Path | None = None) -> Path:
    """Build a wheel and install it; return the scripts of the environment."""
    built = wheel(root / "dist", QFUSE_WHEEL_KERNELS="" if libraries is None else str(libraries))
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


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of an environment in which the wheel is installed."""
    return installed_in(tmp_path_factory.mktemp("installed"))


def call(
    environment: Path, *args: str, folder: Path, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run the installed command, with nothing else on Python's path than ``folder``."""
    variables = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200", **more}
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


COMMANDS = ("", *main.list_commands(click.Context(main)))
LACKING = {
    ("explain", "llama"): "qfuse[zoo]",
    ("bench",): "pip install ./benchmarks",
    ("demo",): "pip install ./benchmarks",
}
# Runs commands one after the other: starting a process of Python with torch takes seconds.
RUNNING = """
import contextlib, io, json, sys
from qfuse.cli import main
for args in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(args, prog_name="qfuse")
        except SystemExit as stop:
            code = stop.code
    print(json.dumps([args, code, out.getvalue(), err.getvalue()]))
"""


class Told(NamedTuple):
    """What a command said."""

    code: int
    out: str
    err: str


def helped(command: str) -> tuple[str, ...]:
    """The arguments that ask a command for help."""
    return (command, "--help") if command else ("--help",)


@pytest.fixture(scope="module")
def told(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Told]:
    """What commands say in the environment, by their arguments."""
    asked = [*map(helped, COMMANDS), *LACKING]
    done = subprocess.run(
        [str(environment / "python"), "-c", RUNNING, json.dumps(asked)],
        env={**os.environ, "PYTHONPATH": ""}, cwd=tmp_path_factory.mktemp("empty"),
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, done.stdout.splitlines())
    return {tuple(args): Told(*rest) for args, *rest in lines}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_starts(told: dict[Any, Told], command: str) -> None:
    said = told[helped(command)]

    assert said.code == 0, said.err
    assert f"Usage: qfuse {command}".rstrip() in said.out


@pytest.mark.parametrize(("args", "says"), LACKING.items())
def test_what_needs_another_package_says_so(
    told: dict[Any, Told], args: tuple[str, ...], says: str
) -> None:
    said = told[args]

    assert said.code == 2
    assert says in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--version",), [__version__]),
        pytest.param(("doctor",), ["instruction set: "], marks=pytest.mark.thorough),
        (("compile", "model:small", "--no-own-kernels", "--backend=eager"), ["eager"]),
        pytest.param(
            ("explain", "model:small", "--no-own-kernels", "--quantize=w8a16", "--verbose"),
            ["explained, not compiled", "Quantized ops"],
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_commands_work_in_a_process_of_their_own(
    environment: Path, tmp_path: Path, args: tuple[str, ...], says: list[str]
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    done = call(environment, *args, folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert all(text in done.stdout for text in says)


INT8 = """
import torch
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

def small():
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 256)).eval()
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model, (torch.randn(32, 256),)
"""


@pytest.mark.thorough
@pytest.mark.own_kernels
def test_a_wheel_with_kernels_needs_no_compiler(tmp_path: Path) -> None:
    """What ``make wheel`` builds, where there is no compiler and no cache."""
    built = tmp_path / "kernels"
    copied = CliRunner().invoke(main, ["build-kernels", "--into", str(built)])
    assert copied.exit_code == 0, copied.output
    environment = installed_in(tmp_path / "installed", built)
    (tmp_path / "model.py").write_text(INT8)
    without = {"PATH": str(environment), "CXX": "", "QFUSE_CACHE_DIR": str(tmp_path / "cache")}
    options = ("--backend=eager", "--prefer=memory", "--verbose", "-o", "small.qfuse")
    done = call(environment, "compile", "model:small", *options, folder=tmp_path, **without)
    again = call(environment, "verify", "small.qfuse", folder=tmp_path, **without)

    assert done.returncode == 0, done.stderr
    assert "2 x qfuse.linear_w8a8" in done.stdout
    assert not (tmp_path / "cache" / "kernels").exists()
    assert again.returncode == 0, again.stderr
    said = [line.split()[-1] for line in again.stdout.splitlines()[:-1]]
    assert said == list(kernels.load().instruction_sets)
