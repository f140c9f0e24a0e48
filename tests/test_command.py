"""The console script answers without torch what needs none."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import qfuse
from qfuse.cli import main, plugins
from qfuse.cli.saved import bench_saved_command
from qfuse.cost import CostProfile
from qfuse.ir.errors import QfuseError, StrictError
from qfuse.plans import PlanData, Site
from qfuse.report import Report
from qfuse.targets import Target
from qfuse_command import COMMANDS, ERROR, INTERRUPTED, NO, UNREAD, overview
from tests.support.processes import run_python


def answer(*arguments: str, code: int = 0) -> str:
    """What the console script prints before it exits with ``code``, and whether it imported torch."""
    script = (
        "import sys, atexit\n"
        f"sys.argv = ['qfuse', *{arguments!r}]\n"
        "atexit.register(lambda: print('torch' in sys.modules))\n"
        "from qfuse_command import console_main\n"
        "console_main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_version_and_help_do_not_import_torch() -> None:
    assert answer("--version") == f"qfuse, version {qfuse.__version__}\nFalse\n"
    shown = answer("--help")
    assert shown.startswith("Usage: qfuse [OPTIONS] COMMAND [ARGS]...\n")
    assert shown.endswith("False\n")


def test_two_reports_are_compared_without_torch(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text(Report(()).to_json())

    assert answer("diff", str(file), str(file)) == "not worse\nFalse\n"
    assert answer("diff", "-h").startswith("Usage: qfuse diff [OPTIONS] BEFORE AFTER\n")


def test_two_plans_are_compared_without_torch(tmp_path: Path) -> None:
    target = Target.for_testing()
    one = PlanData({"qfuse": "1"}, target, CostProfile.pinned(), sites=(Site("optimize/a@x"),))
    other = replace(one, sites=(), target=replace(target, threads=4))
    files = [str(tmp_path / name) for name in ("one.json", "other.json")]
    for plan, file in zip((one, other), files, strict=True):
        plan.save(file)

    assert answer("plan", "diff", files[0], files[0]).splitlines() == [
        "the plans make the same decisions", "False",
    ]  # fmt: skip
    assert answer("plan", "diff", *files, code=1).splitlines() == [
        "~ target threads: 2 -> 4", "- site optimize/a@x", "False",
    ]  # fmt: skip
    Path(files[1]).write_text("{}")
    assert answer("plan", "diff", *files, code=2) == "False\n"
    assert answer("plan", "-h").startswith("Usage: qfuse plan [OPTIONS] COMMAND [ARGS]...\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_begins_with_what_the_overview_says(name: str) -> None:
    command = main.commands[name]
    text = " ".join(CliRunner().invoke(main, [name, "-h"]).output.split())

    assert (command.help or "").split("\n\n")[0] == COMMANDS[name]
    assert f"{COMMANDS[name]} " in text


def test_the_overview_is_the_help_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if the package of the benchmarks were not installed.
    monkeypatch.setattr(plugins, "_installed", dict)
    short, whole = (
        CliRunner().invoke(group, ["--help"], prog_name="qfuse").output
        for group in (overview(), main)
    )

    assert short == whole


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (ZeroDivisionError("a crash"), ERROR, "ZeroDivisionError: a crash"),
        (QfuseError("not so"), ERROR, "error: not so\n"),
        (StrictError("in float"), NO, "error: in float\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_only_an_answer_exits_with_1(raised: BaseException, code: int, said: str) -> None:
    script = (
        "import sys, click\n"
        "from qfuse.cli import main\n"
        "from qfuse.ir.errors import QfuseError, StrictError\n"
        f"def run(): raise {raised!r}\n"
        "main.add_command(click.Command('broken', callback=run))\n"
        "sys.argv = ['qfuse', 'broken']\n"
        "from qfuse_command import console_main\n"
        "console_main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert ("Traceback" in done.stderr) == (type(raised) is ZeroDivisionError)


PRINTS = {
    "click": "click.echo('x')",
    "rich": "from qfuse.cli.console import OUT; OUT.print('x')",
}


@pytest.mark.parametrize("prints", PRINTS.values(), ids=PRINTS)
def test_output_that_nobody_reads_is_not_an_answer(prints: str) -> None:
    script = (
        "import sys, click\n"
        "from qfuse.cli import main\n"
        f"def run():\n    {prints}\n"
        "main.add_command(click.Command('printing', callback=run))\n"
        "sys.argv = ['qfuse', 'printing']\n"
    )
    assert unread(script) == UNREAD


@pytest.mark.parametrize("arguments", [["--version"], ["diff", "-h"]])
def test_help_that_nobody_reads_is_not_an_answer(arguments: list[str]) -> None:
    assert unread(f"import sys\nsys.argv = ['qfuse', *{arguments!r}]\n") == UNREAD


@pytest.mark.thorough
def test_ctrl_c_while_modules_are_imported() -> None:
    script = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'qfuse.cli':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "sys.argv = ['qfuse', 'doctor']\n"
        "from qfuse_command import console_main\n"
        "console_main()\n"
    )
    done = run_python(script)
    assert done.returncode == INTERRUPTED
    assert "Traceback" not in done.stderr


def test_letters_that_the_output_cannot_express_are_escaped() -> None:
    script = (
        "import sys, click\n"
        "from qfuse.cli import main\n"
        "from qfuse.cli.console import ERR, OUT\n"
        "def run(): OUT.print('m\\xf6d.py'); ERR.print('m\\xf6d.py'); print('\\udcff')\n"
        "main.add_command(click.Command('printing', callback=run))\n"
        "sys.argv = ['qfuse', 'printing']\n"
        "from qfuse_command import console_main\n"
        "console_main()\n"
    )
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, check=False, env=ascii_only,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "m\\xf6d.py\n\\udcff\n"
    assert done.stderr == "m\\xf6d.py\n"


def unread(script: str) -> int:
    """The exit status of the command line if no process reads what it prints."""
    read, write = os.pipe()
    os.close(read)
    script += "from qfuse_command import console_main\nconsole_main()\n"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, stdout=write, stderr=write, check=False)
    os.close(write)
    return done.returncode


def test_a_factor_is_a_number() -> None:
    result = CliRunner().invoke(main, ["diff", "a.json", "b.json", "--factor", "nan"])
    assert result.exit_code == ERROR
    assert "Invalid value for '--factor': nan is not a number" in result.output


def test_both_commands_say_how_many_threads_there_may_be() -> None:
    for command in ("compile", "bench"):
        found = main.commands[command] if command == "compile" else bench_saved_command
        (option,) = [one for one in found.params if one.name == "threads"]
        assert isinstance(option, click.Option)
        assert "1 or more; by default torch's" in str(option.help)
