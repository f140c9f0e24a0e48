"""Files of benchmarks: wrong paths are refused before anything is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.bench.results import results

from qfuse.ir.errors import OptionsError
from qfuse_bench.experiments.compile_time import CostOptions, run_compile_cost
from qfuse_bench.harness.machine_class import MachineClass
from qfuse_bench.report.outputs import Outputs

KIND = MachineClass("avx2")


def page_of(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text)
    return page


def test_both_files_are_written(tmp_path: Path) -> None:
    page = page_of(tmp_path, "# Head\n<!-- begin: models -->\n<!-- end: models -->\n")
    outputs = Outputs("models", page, tmp_path / "found.json", kind=KIND)
    outputs.write({"rounds": 15}, results=results())

    assert json.loads((tmp_path / "found.json").read_text()) == {"rounds": 15}
    assert "<!-- begin: models avx2 -->" in page.read_text()


def test_nothing_is_written_unasked(tmp_path: Path) -> None:
    Outputs("models").write({"rounds": 15}, results=results())
    Outputs("models", json=tmp_path / "found.json").write(results=results())

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# Head\n", "no section 'models'"),
        ("<!-- begin: models -->\n<!-- begin: models avx2 -->\n<!-- end: models -->\n", "broken"),
    ],
)
def test_a_page_without_the_section_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        Outputs("models", page_of(tmp_path, text))


def test_missing_pages_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match="no page"):
        Outputs("models", tmp_path / "none.md")
    with pytest.raises(OptionsError, match="no folder"):
        Outputs("models", json=tmp_path / "none" / "found.json")


def test_a_wrong_page_is_told_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure() -> None:
        pytest.fail("it was measured")

    monkeypatch.setattr("qfuse_bench.experiments.compile_time._pipeline", measure)
    with pytest.raises(OptionsError, match="no page"):
        run_compile_cost(CostOptions(page=tmp_path / "none.md"), None)  # type: ignore[arg-type]
