"""What two plans decide differently, as lines and on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.plans.test_plans import compiled, data_of, site_of

from qfuse.cli import main
from qfuse.plans import diff_plans, read_plan

pytestmark = pytest.mark.own_kernels


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return data_of(compiled())


def test_every_kind_of_difference_has_a_line(data: dict[str, Any]) -> None:
    other = json.loads(json.dumps(data))
    merge, gone = site_of(other, "merge-linears"), other["sites"][0]
    merge["on"] = False
    other["sites"].remove(gone)
    other["sites"].append({"site": "optimize/new@x", "on": True})
    last = other["kernels"][-1]
    before, last["kernel"] = last["kernel"], "expand"
    first = other["kernels"].pop(0)
    other["versions"]["torch"] = "2.14.0"
    other["options"]["without"] = ["fuse-add"]
    other["target"]["threads"] = 7

    assert set(diff_plans(read_plan(data), read_plan(other))) == {
        f"~ site {merge['site']}: on -> off",
        f"- site {gone['site']}",
        "+ site optimize/new@x",
        f"~ kernel of {last['op']}: {before} -> expand",
        f"- kernel of {first['op']}: {first['kernel']}",
        f"~ version of torch: {data['versions']['torch']} -> 2.14.0",
        "~ option without: () -> ('fuse-add',)",
        f"~ target threads: {data['target']['threads']} -> 7",
    }


def test_lines_and_speeds_are_not_differences(data: dict[str, Any]) -> None:
    other = json.loads(json.dumps(data))
    other["sites"][0]["where"] = "elsewhere.py:1: x"
    other["profile"]["threads"] = 9
    assert diff_plans(read_plan(data), read_plan(other)) == []


def test_the_command_exits_with_1_on_a_difference(data: dict[str, Any], tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    one.write_text(json.dumps(data))
    data["kernels"][-1]["kernel"] = "expand"
    other.write_text(json.dumps(data))

    same = CliRunner().invoke(main, ["plan", "diff", str(one), str(one)])
    assert (same.exit_code, same.output) == (0, "the plans make the same decisions\n")
    differs = CliRunner().invoke(main, ["plan", "diff", str(one), str(other)])
    assert differs.exit_code == 1
    assert differs.output.startswith("~ kernel of ")
    wrong = CliRunner().invoke(main, ["plan", "diff", str(one), str(tmp_path / "absent")])
    assert wrong.exit_code == 2
    assert "cannot be read" in wrong.output


def test_compile_saves_and_replays(tmp_path: Path) -> None:
    file, again = tmp_path / "plan.json", tmp_path / "again.json"
    model = ["compile", "tests.plans.factory:siblings", "--backend=eager"]
    first = CliRunner().invoke(main, [*model, f"--save-plan={file}"])
    assert first.exit_code == 0, first.output
    data = json.loads(file.read_text())
    site_of(data, "merge-linears")["on"] = False
    file.write_text(json.dumps(data))
    second = CliRunner().invoke(
        main, [*model, f"--use-plan={file}", f"--save-plan={again}", "--verbose"]
    )
    assert second.exit_code == 0, second.output
    assert "the plan was edited: sites off: 1" in second.output
    (line,) = [
        t for t in diff_plans(read_plan(file), read_plan(again)) if "merge-linears" in t
    ] or [""]
    assert line == ""
