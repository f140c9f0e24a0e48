"""Models of ``qfuse.compile``: signatures, containers, reports, examples; and what refuses to load."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qfuse
from qfuse import kernels
from qfuse.ir.errors import CompiledModelError, InputError, ModelFileError
from qfuse.ir.events import Noted
from qfuse.kernels import build, library_key
from qfuse.saving import load
from qfuse.saving.container import open_file, write_file
from qfuse.targets import Target
from qfuse.zoo import recipes


@dataclass
class Result:
    y: Any
    parts: Any
    missing: Any = None


torch.export.register_dataclass(Result, serialized_type_name="tests.saving.Result")


class Nested(nn.Module):
    """Containers, constants, sizes, aliases and writes."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)
        self.register_buffer("calls", torch.tensor(0))

    def forward(
        self,
        x: dict[str, Tensor],
        scale: float = 2.0,
        mode: str = "plain",
        *,
        out: Tensor | None = None,
    ) -> Result:
        self.calls += 1
        y = self.fc(x["a"]) * scale + x["b"][0]
        if out is not None:
            out.copy_(y)
        parts = {
            "same": y,
            "rows": y.shape[0],
            "calls": self.calls + 0,
            "none": None,
            "n": (3, mode),
        }
        return Result(y, [parts, x["a"]])


def nested(rows: int = 5) -> dict[str, Any]:
    return {"a": torch.randn(rows, 8), "b": [torch.randn(4)]}


@pytest.fixture
def fast() -> qfuse.CompiledModel:
    dims = {"x": {"a": {0: torch.export.Dim("rows", min=1, max=64)}, "b": [None]}, "out": None}
    shapes = {**dims, "out": {0: torch.export.Dim("rows", min=1, max=64)}}
    return qfuse.compile(
        Nested().eval(),
        (nested(),),
        {"out": torch.zeros(5, 4)},
        dynamic_shapes=shapes,
        options={"backend": "eager"},
        target=Target.for_testing(),
    )


@pytest.fixture
def path(fast: qfuse.CompiledModel, tmp_path: Path) -> Path:
    place = tmp_path / "nested.qfuse"
    fast.save(place)
    return place


def assert_same(have: Result, want: Result) -> None:
    assert type(have) is Result
    assert torch.equal(have.y, want.y)
    one, other = have.parts[0], want.parts[0]
    assert one["same"] is have.y
    assert list(one) == list(other)
    assert (one["rows"], one["none"], one["n"]) == (other["rows"], None, (3, "plain"))
    assert torch.equal(one["calls"], other["calls"])


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_calls_are_the_same(fast: qfuse.CompiledModel, path: Path, rows: int) -> None:
    again = qfuse.load(str(path))
    x, buffers = nested(rows), [torch.zeros(rows, 4), torch.zeros(rows, 4)]
    for _ in range(2):
        want, have = fast(x, out=buffers[0]), again(x, out=buffers[1])
        assert_same(have, want)
        assert have.parts[1] is x["a"]
        assert torch.equal(buffers[0], buffers[1])
        # A default that is passed is the same call, and keywords are.
        assert_same(again(x=x, scale=2.0, out=buffers[1]), fast(x, out=buffers[0]))


def test_errors_are_the_same(fast: qfuse.CompiledModel, path: Path) -> None:
    again = qfuse.load(path)
    for args, kwargs in (
        ((nested(65),), {"out": torch.zeros(65, 4)}),
        ((nested(),), {}),
        ((nested(),), {"out": torch.zeros(5, 4), "scale": 3.0}),
        (({"a": torch.randn(5, 8)},), {"out": torch.zeros(5, 4)}),
    ):
        with pytest.raises(InputError) as want:
            fast(*args, **kwargs)
        with pytest.raises(InputError) as have:
            again(*args, **kwargs)
        assert str(have.value) == str(want.value)


def test_report_and_plan_come_back(fast: qfuse.CompiledModel, path: Path) -> None:
    again = qfuse.load(path)
    assert again.report == fast.report
    assert str(again.report) == str(fast.report)
    assert str(again.plan) == str(fast.plan)
    # Its decisions are not in the file.
    with pytest.raises(CompiledModelError, match=r"fast\.plan\.save"):
        again.plan.save(path.with_suffix(".json"))
    assert repr(again) == repr(fast)
    assert again.signature.relations == fast.signature.relations


def test_examples_come_back(fast: qfuse.CompiledModel, path: Path) -> None:
    again = qfuse.load(path)
    assert again.examples is not None
    args, kwargs = again.examples
    assert args[0]["a"].shape == (5, 8)
    want = fast.examples
    assert want is not None
    assert_same(again(*args, **kwargs), fast(*want[0], **want[1]))
    # They are copies: the model writes this one.
    assert kwargs["out"].abs().sum() > 0
    assert again.examples[1]["out"].abs().sum() == 0


def test_examples_of_ones_own(fast: qfuse.CompiledModel, tmp_path: Path) -> None:
    place = tmp_path / "m.qfuse"
    fast.save(place, (nested(2),), {"out": torch.ones(2, 4)})
    again = qfuse.load(place)
    assert again.examples is not None
    assert again.examples[0][0]["a"].shape == (2, 8)
    with pytest.raises(InputError):
        fast.save(place, (nested(2),))


def test_large_examples_are_not_kept(tmp_path: Path) -> None:
    x = torch.zeros(1 << 22)
    fast = qfuse.compile(nn.ReLU(), (x,), options={"backend": "eager"}, check="off")
    fast.save(tmp_path / "m.qfuse")
    assert qfuse.load(tmp_path / "m.qfuse").examples is not None
    x = torch.zeros((1 << 22) + 1)
    fast = qfuse.compile(nn.ReLU(), (x,), options={"backend": "eager"}, check="off")
    fast.save(tmp_path / "m.qfuse")
    assert qfuse.load(tmp_path / "m.qfuse").examples is None


def test_the_same_model_makes_the_same_file(path: Path) -> None:
    again = path.with_name("again.qfuse")
    qfuse.load(path).save(again)
    assert again.read_bytes() == path.read_bytes()


def test_pickle(fast: qfuse.CompiledModel) -> None:
    again = pickle.loads(pickle.dumps(fast))
    x = nested()
    assert_same(again(x, out=torch.zeros(5, 4)), fast(x, out=torch.zeros(5, 4)))
    assert again.report == fast.report
    for one, other in ((again, fast), (fast, again)):
        one(x, out=torch.zeros(5, 4))
        assert not torch.equal(
            one(x, out=torch.zeros(5, 4)).parts[0]["calls"],
            other(x, out=torch.zeros(5, 4)).parts[0]["calls"] + 3,
        )


def test_deepcopy_of_a_loaded_model(path: Path) -> None:
    again = qfuse.load(path)
    twin = copy.deepcopy(again)
    x, out = nested(), torch.zeros(5, 4)
    for count in (1, 2):
        assert again(x, out=out).parts[0]["calls"].item() == count
    assert twin(x, out=out).parts[0]["calls"].item() == 1
    assert twin.report is again.report


def test_a_sequence_of_quantized_layers(tmp_path: Path) -> None:
    """The names of its constants begin with a digit."""
    x = torch.randn(4, 32)
    model = recipes.quantize(
        nn.Sequential(nn.Linear(32, 16), nn.ReLU()), "w8a8-dynamic", (x,)
    ).model
    made = qfuse.compile(model, (x,), options={"backend": "eager"})
    made.save(tmp_path / "model.qfuse")
    assert torch.equal(qfuse.load(tmp_path / "model.qfuse")(x), made(x))


def rewritten(path: Path, **changes: Any) -> Path:
    """The same file with another manifest."""
    opened = open_file(path)
    members = {name: [opened.read(name)] for name in opened._places}
    write_file(path, {**opened.manifest, **changes}, members)
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"torch": "2.99.0+cpu"}, r"saved with torch 2\.99\.0\+cpu, and this is 2"),
        ({"machine": "linux sparc"}, "a machine of the kind linux sparc"),
        (
            {"kernels": {"key": "0" * 64, "libraries": []}},
            (
                rf"another build of qfuse {qfuse.__version__}, with other kernels "
                rf"\(000000000000, here {library_key()[:12]}\)"
            ),
        ),
        (
            {"qfuse": "0.0.7", "kernels": {"key": "0" * 64}},
            rf"saved by qfuse 0\.0\.7, and qfuse {qfuse.__version__} has other kernels",
        ),
    ],
    ids=["torch", "machine", "build", "version"],
)
def test_code_for_elsewhere_is_refused(
    path: Path, changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("nothing is loaded")

    rewritten(path, **changes)
    monkeypatch.setattr(kernels, "load_images", never)
    with pytest.raises(ModelFileError, match=words) as error:
        qfuse.load(path)
    assert error.value.where == str(path)
    assert "save the model" in str(error.value.fix)
    # That version is installed.
    assert f"install qfuse {qfuse.__version__}" not in str(error.value.fix)


def test_code_for_missing_instructions_is_not_used(path: Path) -> None:
    again = qfuse.load(rewritten(path, isa="AVX512 AMX_NEXT"))

    (note,) = (note for note in again.report.notes if "AMX_NEXT" in note.text)
    assert note.warn
    assert "runs op by op" in note.text
    assert "`qfuse compile MODEL -o FILE`" in note.text


def test_nothing_is_used_before_the_digests_agree(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("nothing is used")

    for name in ("_check_machine", "_load_kernels", "graph_from_data", "_signature", "_report"):
        monkeypatch.setattr(load, name, never)
    with pytest.raises(ModelFileError, match="bytes of 'weights'"):
        qfuse.load(path)


def test_weights_need_not_be_compared(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert qfuse.load(path, verify=False).backend == "eager"
    opened = open_file(path)
    begin, _ = opened.place("model.json")
    data[begin] ^= 1
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=r"bytes of 'model\.json'"):
        qfuse.load(path, verify=False)


def test_malformed_contents_are_an_error_of_the_file(path: Path) -> None:
    opened = open_file(path)
    members = {name: [opened.read(name)] for name in opened._places}
    members["model.json"] = [b'{"signature": {}}']
    write_file(path, opened.manifest, members)
    with pytest.raises(ModelFileError, match="malformed"):
        qfuse.load(path)


def test_a_report_of_another_version(path: Path) -> None:
    opened = open_file(path)
    members = {name: [opened.read(name)] for name in opened._places}
    text = opened.read("report.json").replace(b'"warn"', b'"worn"').replace(b'"passed"', b'"past"')
    members["report.json"] = [text]
    write_file(path, {**opened.manifest, "qfuse": "0.0.9"}, members)
    (note,) = qfuse.load(path).report.notes
    assert note.warn
    assert "qfuse 0.0.9" in note.text


def test_inputs_that_are_none(tmp_path: Path) -> None:
    class Keyed(nn.Module):
        def forward(self, x: Tensor, kind: Any) -> Tensor:
            return x + 1 if kind is None else x

    fast = qfuse.compile(Keyed(), (torch.ones(2), None), options={"backend": "eager"}, check="off")
    fast.save(tmp_path / "m.qfuse")
    assert torch.equal(qfuse.load(tmp_path / "m.qfuse")(torch.ones(2), None), torch.full((2,), 2.0))


def test_replaced_classes_are_in_the_report(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(globals(), "Result")
    again = qfuse.load(path)
    (note,) = [
        event
        for event in again.report.events
        if isinstance(event, Noted) and event.stage == "saving"
    ]
    assert f"{__name__}:Result is a named tuple" in note.text
    out = again(nested(), out=torch.zeros(5, 4))
    assert out._fields == ("y", "parts", "missing")
    assert torch.equal(out.parts[0]["same"], out.y)
    assert out.missing is None


def test_the_key_is_that_of_the_sources() -> None:
    assert build.library_key() == build._key(build._SOURCES)
