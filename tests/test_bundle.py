"""The bundle of `qfuse doctor`: what it holds, and what it must not."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from qfuse import kernels
from qfuse.cli import main
from qfuse.cli.bundle import VARIABLES


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is built for a bundle of a test."""
    library = kernels.KernelLibrary(False, "not in this test")
    monkeypatch.setattr(kernels, "load", lambda *_: library)


@pytest.mark.usefixtures("no_kernels")
def test_it_holds_what_it_lists_and_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home-of-ada"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("CXX", str(home / "bin/g++"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("QFUSE_TOKEN", "another_secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    (tmp_path / "report.json").write_text(json.dumps({"events": [{"source": f"{home}/m.py:1"}]}))
    file = tmp_path / "bundle.zip"

    result = CliRunner().invoke(
        main, ["doctor", f"--bundle={file}", f"--report={tmp_path / 'report.json'}"]
    )
    assert result.exit_code == 0, result.output
    with zipfile.ZipFile(file) as bundle:
        names = bundle.namelist()
        texts = {name: bundle.read(name).decode() for name in names}
    listed = [line.split()[0] for line in result.output.splitlines()[:-1]]
    assert listed == names
    assert set(json.loads(texts["contents.json"])) == set(names) - {"contents.json"}
    assert set(json.loads(texts["environment.json"])) == set(VARIABLES)
    assert json.loads(texts["environment.json"])["OMP_NUM_THREADS"] == "3"
    assert json.loads(texts["environment.json"])["CXX"] == "~/bin/g++"
    assert json.loads(texts["kernels.json"])["reason"] == "not in this test"
    assert json.loads(texts["report.json"])["events"][0]["source"] == "~/m.py:1"
    assert {"torch", "qfuse", "python"} <= set(json.loads(texts["versions.json"]))
    for text in texts.values():
        assert "secret" not in text
        assert "home-of-ada" not in text
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--report=report.json"], "--report needs --bundle"),
        (["--bundle=absent/b.zip"], "cannot be written"),
        (["--bundle=b.zip", "--report=absent.json"], "cannot be read"),
    ],
)
def test_what_cannot_be_done_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["doctor", *options])
    assert result.exit_code == 2
    assert word in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.own_kernels
def test_the_kernels_are_described(tmp_path: Path) -> None:
    file = tmp_path / "bundle.zip"
    assert CliRunner().invoke(main, ["doctor", f"--bundle={file}"]).exit_code == 0
    with zipfile.ZipFile(file) as bundle:
        data = json.loads(bundle.read("kernels.json"))
    assert data["available"]
    assert data["instruction_sets"]
    assert data["description"]["compiler"]


@pytest.mark.usefixtures("no_kernels")
def test_of_a_link_the_file_that_it_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "link.zip").symlink_to("bundle.zip")
    result = CliRunner().invoke(main, ["doctor", f"--bundle={tmp_path / 'link.zip'}"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "link.zip").is_symlink()
    assert zipfile.is_zipfile(tmp_path / "bundle.zip")
