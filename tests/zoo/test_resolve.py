"""From what a user types to a model, and a clear word for every wrong form."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from tests.support.graphs.tiny_models import TINY
from torch import nn

from qfuse.ir.errors import OptionsError
from qfuse.zoo import recipes
from qfuse.zoo.resolve import load_model

FACTORIES = """
import torch
from torch import nn

class Net(nn.Linear):
    def __init__(self, width=4):
        super().__init__(width, 2)

def bare(): return nn.Linear(4, 2)
def with_args(rows=3): return nn.Linear(4, 2), (torch.ones(rows, 4),)
def with_kwargs(): return nn.Linear(4, 2), (), {"input": torch.ones(3, 4)}
def with_shapes(): return nn.Linear(4, 2), (torch.ones(3, 4),), {}, {"input": {0: torch.export.Dim.AUTO}}
def needs(size): return nn.Linear(size, 2)
def unwrapped(): return nn.Linear(4, 2), torch.ones(3, 4)
def nothing(): return None
def too_many(): return nn.Linear(4, 2), (), {}, 1
def fails(): return {}["missing"]
made = nn.Linear(4, 2)
class Inside:
    @staticmethod
    def factory(): return nn.Linear(4, 2)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with modules whose names no other test uses."""
    (tmp_path / "qfuse_resolve_models.py").write_text(FACTORIES)
    (tmp_path / "qfuse_resolve_broken.py").write_text("import qfuse_resolve_absent")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "qfuse_resolve_models", raising=False)
    return tmp_path


def test_a_name_of_the_zoo() -> None:
    found = load_model("bert", {**TINY["bert"], "layers": "1"})
    assert isinstance(found.model, nn.Module)
    assert set(found.kwargs or {}) == {"input_ids", "attention_mask"}
    assert found.dynamic_shapes is not None
    assert found.zoo is not None
    assert found.zoo.module is found.model


@pytest.mark.usefixtures("folder")
def test_a_factory_declares_which_sizes_may_vary() -> None:
    found = load_model("qfuse_resolve_models:with_shapes")
    assert found.dynamic_shapes == {"input": {0: torch.export.Dim.AUTO}}
    assert len(found.args) == 1


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("name", "sizes", "args", "kwargs"),
    [
        ("bare", {}, 0, 0),
        ("with_args", {}, 1, 0),
        ("with_args", {"rows": 5}, 1, 0),
        ("with_kwargs", {}, 0, 1),
        ("needs", {"size": 4}, 0, 0),
        ("Net", {"width": 4}, 0, 0),
        ("Inside.factory", {}, 0, 0),
    ],
)
def test_a_factory(name: str, sizes: dict[str, object], args: int, kwargs: int) -> None:
    path = list(sys.path)
    found = load_model(f"qfuse_resolve_models:{name}", sizes)
    assert sys.path == path
    assert isinstance(found.model, nn.Linear)
    assert (len(found.args), len(found.kwargs or {})) == (args, kwargs)
    if args:
        assert found.args[0].shape == (sizes.get("rows", 3), 4)


def test_a_file(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    model = nn.Linear(4, 2)
    torch.export.save(torch.export.export(model, (x,), strict=False), tmp_path / "m.pt2")
    found = load_model(str(tmp_path / "m.pt2"))
    assert isinstance(found.model, torch.export.ExportedProgram)
    assert torch.equal(found.args[0], x)
    assert torch.equal(found.model.module(check_guards=False)(x), model(x))


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_a_file_with_operators_of_torchao_needs_no_import_by_the_user(tmp_path: Path) -> None:
    x, path = torch.randn(3, 64), tmp_path / "m.pt2"
    quantized = recipes.quantize(nn.Linear(64, 8), "w8a8-static", (x,)).model
    torch.export.save(torch.export.export(quantized, (x,), strict=False), path)
    code = f"from qfuse.zoo.resolve import load_model; print(load_model({str(path)!r}).model.graph)"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True, env=os.environ
    )
    assert "quantized_decomposed.quantize_per_tensor.default" in output.stdout


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("spec", "sizes", "words"),
    [
        ("lama", {}, "'lama' is not a model"),
        (".", {}, "'.' is a folder, not a model"),
        ("", {}, "give a name of the zoo, module:factory, file.py:factory, or the path"),
        (":factory", {}, "is incomplete"),
        ("module:", {}, "is incomplete"),
        ("models.py", {}, "does not say which function"),
        ("qfuse_resolve_nowhere:f", {}, "no module 'qfuse_resolve_nowhere'"),
        ("qfuse_resolve_nowhere.inner:f", {}, "no module 'qfuse_resolve_nowhere'"),
        ("qfuse_resolve_models.inner:f", {}, "no module 'qfuse_resolve_models.inner'"),
        ("qfuse_resolve_models:absent", {}, "has no 'absent'"),
        ("qfuse_resolve_models:made", {}, "made is a Linear, not a function"),
        ("qfuse_resolve_models:FACTORY.x", {}, "has no 'FACTORY.x'"),
        ("qfuse_resolve_models:needs", {}, "missing a required argument: 'size'"),
        ("qfuse_resolve_models:bare", {"size": 1}, "unexpected keyword argument 'size'"),
        ("qfuse_resolve_models:unwrapped", {}, "the inputs are a tuple"),
        ("qfuse_resolve_models:nothing", {}, "returned NoneType"),
        ("json:dumps", {}, "cannot be called without arguments: missing"),
        ("qfuse_resolve_models:too_many", {}, r"returned \(Linear, tuple, dict, int\)"),
        ("absent.pt2", {}, "there is no such file"),
        ("folder.pt2", {}, "this is a folder"),
        ("text.pt2", {}, "this is not a .pt2 file, or it is cut off"),
        ("other.pt2", {}, "does not hold an exported program"),
        ("other.pt2", {"layers": 2}, "leave the sizes out"),
    ],
)
def test_wrong_forms_are_refused_with_what_to_do(
    folder: Path, spec: str, sizes: dict[str, object], words: str
) -> None:
    (folder / "text.pt2").write_text("not a program")
    (folder / "folder.pt2").mkdir()
    with zipfile.ZipFile(folder / "other.pt2", "w") as archive:
        archive.writestr("a/b", "c")
    path = list(sys.path)
    with pytest.raises(OptionsError, match=words) as caught:
        load_model(spec, sizes)
    assert caught.value.fix
    assert sys.path == path
