from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import CliRunner, Result

from qfuse import kernels, session
from qfuse.cli import main
from qfuse.cost import load_or_measure, profile_path
from qfuse.kernels.build import build
from qfuse.kernels.compilation.parts import PATHS
from qfuse.targets import Target

SMALL = [
    f"--size={size}" for size in ("layers=1", "hidden=32", "intermediate=64", "vocab=50", "heads=2")
]


def run(*args: str) -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(main, args)


@pytest.mark.parametrize(
    "command", [(), ("compile",), ("explain",), ("bench",), ("doctor",), ("build-kernels",)]
)
def test_every_command_has_help(command: tuple[str, ...]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_options_come_from_the_dataclass() -> None:
    text = run("compile", "--help").output
    for flag in ("--backend", "--cache / --no-cache", "--own-kernels", "--check", "--quantize"):
        assert flag in text


@pytest.mark.zoo
def test_explain_writes_json() -> None:
    result = run("explain", "bert", *SMALL, "--size=seq=4", "--quantize=w8a8-dynamic", "--json=-")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    kernel = "qfuse.linear_w8a8" if kernels.load().available else "expand"
    # Two layer norms quantize what they give; on four tokens loops are as fast. So does the gelu,
    # which the kernel of the linear in front of it takes along.
    expected = Counter({kernel: 5}) + Counter({"expand": 2 if kernel != "expand" else 3})
    assert Counter(report["kernels"]) == expected
    assert {event["kind"] for event in report["events"]} >= {"fired", "lowered", "left"}


@pytest.mark.zoo
def test_compile_shows_report_and_plan(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = run(
        "compile", "bert", *SMALL, "--size=seq=4", "--quantize=w8a16", "--backend=eager",
        "--plan", "--verbose", f"--json={file}",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "Quantized ops" in result.output
    assert json.loads(file.read_text())["facts"]["model"] == "bert"
    assert "return (" in result.output
    assert json.loads(file.read_text())["facts"]["backend"] == "eager"


def test_log_lines_come_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that is met twice, after an earlier command, beside a handler of the root logger."""

    class Root(logging.Handler):
        lines: ClassVar[list[str]] = []

        def emit(self, record: logging.LogRecord) -> None:
            self.lines.append(record.getMessage())

    monkeypatch.setenv("QFUSE_CACHE_DIR", str(tmp_path))
    # The tests pin the profile of `qfuse.session`; here the one of the cache is read.
    monkeypatch.setattr(session, "load_or_measure", load_or_measure)
    profile = profile_path(Target.detect(extensions=False))
    monkeypatch.setattr(logging.getLogger(), "handlers", [Root()])
    before = logging.getLogger("qfuse").handlers[:]
    run("doctor", "--help")
    profile.parent.mkdir()
    profile.write_text("not a profile")
    result = run("explain", "bert", *SMALL, "--quantize=w8a8-dynamic", "--no-own-kernels")

    assert result.exit_code == 0, result.output
    assert result.stderr.count("WARNING") == 1
    assert Root.lines == []
    assert logging.getLogger("qfuse").handlers == before


def test_doctor_writes_json() -> None:
    result = run("doctor", "--json")
    assert result.exit_code == 0, result.output
    findings = json.loads(result.stdout)
    assert {"level", "what", "detail", "fix"} <= set(findings[0])
    assert "torch" in {finding["what"] for finding in findings}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("explain", "nosuch"), "'nosuch' is not a model"),
        (("explain", "bert", "--size=layers"), "is not NAME=VALUE"),
        (("explain", "bert", "--size=layers=x"), "not a value of type int"),
        (("explain", "nosuch.pt2"), "there is no such file"),
        (("compile", "json:nothing"), "json has no 'nothing'"),
    ],
)
def test_wrong_input_is_one_message_and_no_traceback(args: tuple[str, ...], message: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert "do:" in result.stderr
    assert "Traceback" not in result.output


def test_a_report_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    target = tmp_path / "none" / "report.json"
    result = CliRunner().invoke(main, ["explain", "llama", "--json", str(target)])
    assert result.exit_code == 2
    assert "folder that does not exist" in result.output


def test_a_group_size_belongs_to_a_recipe() -> None:
    alone = CliRunner().invoke(main, ["explain", "bert", "--group-size", "32"])
    assert alone.exit_code == 2
    assert "add --quantize" in alone.output

    without = ["explain", "bert", *SMALL, "--quantize", "w8a8-dynamic", "--group-size", "32"]
    assert "w8a8-dynamic has no groups" in CliRunner().invoke(main, without).output
    report = run("explain", "bert", *SMALL, "--quantize=w4a16", "--group-size=-1", "--json=-")
    assert report.exit_code == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["llama"], "add --sites"),
        (["--quantize", "w8a16"], "add --sites"),
        (["--sites", "--models", "bert"], "are not for --sites"),
        (["--sites", "nothing"], "is not a model"),
        (["--sites", "--rounds", "3"], "too few"),
    ],
)
def test_bench_says_what_belongs_together(args: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["bench", *args])

    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("missing", "told"),
    [("folder", "point QFUSE_CACHE_DIR at"), ("compiler", "install a C++20 compiler")],
)
def test_build_kernels_says_once_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, told: str
) -> None:
    place = tmp_path / "cache"
    if missing == "folder":
        place.write_text("a file")
    monkeypatch.setenv("QFUSE_CACHE_DIR", str(place))
    with pytest.raises(kernels.KernelBuildError) as error:
        build(None, prebuilt=tmp_path / "none")
    failed = kernels.KernelLibrary(available=False, reason=str(error.value))
    monkeypatch.setattr(kernels, "load", lambda *_: failed)
    result = run("build-kernels")

    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert said.count("do:") == 1
    assert said.count("install") == (missing == "compiler")
    assert told in said


@pytest.mark.own_kernels
def test_build_kernels_says_what_there_is_and_copies_it(tmp_path: Path) -> None:
    result = run("build-kernels", f"--into={tmp_path}")

    assert result.exit_code == 0, result.output
    for text in ("portable", "torch", "copied to"):
        assert text in result.output
    copied = [path.name.partition("-")[0] for path in sorted(tmp_path.rglob("*.so"))]
    assert copied == sorted(["qfuse_kernels", *(f"qfuse_kernels_{name}" for name in PATHS)])
    assert len(list(tmp_path.rglob("*.json"))) == len(copied)


@pytest.mark.own_kernels
def test_build_kernels_into_a_file_is_an_error_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run("build-kernels", f"--into={tmp_path / 'file' / 'folder'}")

    assert result.exit_code == 2
    assert result.stdout == ""
    assert "\nerror: the kernels cannot be copied: " in result.stderr
