from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from qfuse.cli import main

pytestmark = pytest.mark.export


def run(*args: str) -> Result:
    return CliRunner().invoke(main, args)


def float_model(width: int = 64) -> tuple[nn.Module, tuple[torch.Tensor]]:
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8)).eval()
    return model, (torch.randn(16, width),)


FACTORY = "tests.analysis.test_cli:float_model"
BERT = [
    f"--size={s}"
    for s in ("layers=1", "hidden=32", "intermediate=64", "vocab=50", "heads=2", "seq=4")
]


@pytest.mark.parametrize("command", ["lint", "accuracy"])
def test_help(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--quantize" in result.output


def test_lint_prints_places_and_what_to_do() -> None:
    result = run("lint", FACTORY, "--quantize=w8a8-dynamic")
    assert result.exit_code == 0, result.output
    assert "dynamic-quantization" in result.output
    assert "do: static parameters" in " ".join(result.output.split())


def test_lint_writes_json_and_strict_fails_on_warnings() -> None:
    result = run(
        "lint", FACTORY, "--quantize=w8a8-dynamic", "--json", "--strict", "--size=width=16"
    )
    findings = json.loads(result.stdout)
    codes = {finding["code"]: finding["severity"] for finding in findings}
    assert codes["small-layer"] == "warning"
    assert result.exit_code == 1
    assert run("lint", FACTORY, "--strict").exit_code == 0


def test_a_float_model_has_no_findings() -> None:
    result = run("lint", FACTORY)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == "no findings: nothing to change in the quantization"


@pytest.mark.thorough
@pytest.mark.zoo
def test_accuracy_of_a_zoo_model_on_two_batches(tmp_path: Path) -> None:
    plot, file = tmp_path / "layers.svg", tmp_path / "accuracy.json"
    result = run(
        "accuracy", "bert", *BERT, "--quantize=w8a8-dynamic", "--batches=2", "--keep=1",
        f"--plot={plot}", f"--json={file}",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "worst first" in result.output
    data = json.loads(file.read_text())
    assert data["batches"] == 2
    assert data["layers"]
    assert ElementTree.fromstring(plot.read_text()).tag.endswith("svg")


def test_accuracy_of_a_factory_as_json() -> None:
    result = run("accuracy", FACTORY, "--quantize=w8a8-dynamic", "--keep=0", "--json=-")
    assert result.exit_code == 0, result.output
    assert {layer["layer"] for layer in json.loads(result.stdout)["layers"]} == {"0", "2"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("accuracy", FACTORY), "against its float model"),
        (("accuracy", FACTORY, "--quantize=w8a8-dynamic", "--batches=2"), "has one example"),
        (("lint", FACTORY, "--group-size=32"), "--group-size needs --quantize"),
        (("lint", FACTORY, "--size=x"), "is not NAME=VALUE"),
        (("lint", "nosuch"), "is not a model"),
    ],
)
def test_wrong_options_are_one_message(args: tuple[str, ...], message: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert "do:" in result.stderr
