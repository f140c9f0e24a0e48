"""The short scripts run, and fuse what they show."""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import qfuse
from qfuse.targets import Target

FOLDER = Path(__file__).parents[2] / "examples" / "scripts"
NOTEBOOKS = FOLDER.parent / "notebooks"
EAGER: dict[str, Any] = {"options": {"backend": "eager"}, "target": Target.for_testing()}

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"qfuse_example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_script_is_tested() -> None:
    text = Path(__file__).read_text()
    assert [p.stem for p in FOLDER.glob("*.py") if f'script("{p.stem}")' not in text] == []


def test_int8_by_hand() -> None:
    report = script("int8_by_hand").main(64, **EAGER).report
    assert len(report.fused) == 2
    assert not report.left


@pytest.mark.own_kernels
def test_bert_quantize() -> None:
    pytest.importorskip("transformers")
    report = script("bert_quantize").main(64, 1, **EAGER).report
    assert len(report.fused) + len(report.expanded) >= 4
    assert all(check.passed for check in report.checks)


@pytest.mark.own_kernels
def test_cnn_pt2e() -> None:
    report = script("cnn_pt2e").main(16, **EAGER).report
    assert {event.place.op for event in (*report.fused, *report.expanded)} >= {
        "qfuse.convolution",
        "qfuse.linear",
    }


@pytest.mark.own_kernels
def test_llm_static_cache() -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs, ours, fast = script("llm_static_cache").main(64, 1, **EAGER)
    assert ours == theirs
    assert fast.plan.lowered.signature.mutations
    assert fast.report.kernels


@pytest.mark.thorough
@pytest.mark.own_kernels
def test_sentence_encoder() -> None:
    pytest.importorskip("sentence_transformers")
    folder = str(pytest.importorskip("qfuse.zoo._extras").minilm_folder())
    result = script("sentence_encoder").main(folder, **EAGER)

    (want, features), (have, fast_features) = result["quantized"], result["compiled"]
    assert have.shape == want.shape == (3, 384)
    # Dynamic quantization amplifies rounding errors.
    assert (have * want).sum(1).min() > 0.99
    for fast, plain in zip(fast_features, features, strict=True):
        a, b = torch.tensor(fast), torch.tensor(plain)
        assert a.shape == b.shape
        assert torch.nn.functional.cosine_similarity(a, b, dim=-1).min() > 0.95
    assert all(check.passed for check in result["report"].checks)
    assert len(result["report"].fused) >= 24
    # Other sizes than those of the example.
    assert result["encoder"].encode("one").shape == (384,)


@pytest.mark.own_kernels
def test_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    cells = json.loads((NOTEBOOKS / "bert_quantize.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(qfuse, "compile", partial(qfuse.compile, **EAGER))
    names: dict[str, Any] = {}
    for source in code:
        exec(compile(source, "bert_quantize.ipynb", "exec"), names)

    assert names["fast"].report.fused
    assert (tmp_path / "bert.html").stat().st_size > 100_000
    # What it shows was printed by its cells.
    assert all(cell["outputs"] for cell in cells if "print(" in "".join(cell["source"]))
