"""``torch.compile(model, backend="qfuse")`` gives what ``qfuse.compile`` gives, graph by graph."""

from __future__ import annotations

import copy
import tomllib
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dynamo._dynamo_api import graph_break, mark_dynamic
from torch import nn

import qfuse
from qfuse.dynamo import backend
from qfuse.targets import Target
from qfuse.targets.compiler import find_compiler

OPTIONS: dict[str, Any] = {"backend": "eager", "target": Target.for_testing()}


class Linears(nn.Module):
    """Two int8 linears with a graph break between them, if wanted."""

    calls: torch.Tensor

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.second = nn.Linear(32, 16)
        self.breaks = breaks
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        y = torch.relu(self.first(x))
        if self.breaks:
            graph_break()
        out: torch.Tensor = self.second(y) + self.calls
        return out


def quantized(model: nn.Module) -> Any:
    from torchao.quantization import (  # noqa: PLC0415 - takes a second
        Int8DynamicActivationInt8WeightConfig,
        quantize_,
    )

    model.eval()
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model


def fast(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend=backend, options={**OPTIONS, **options})


def kernels(compiled: object) -> list[int]:
    return [len(report.fused) for report in qfuse.reports(compiled)]


def test_the_entry_point_names_the_backend() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    given = project["project"]["entry-points"]["torch_dynamo_backends"]

    assert EntryPoint("qfuse", given["qfuse"], "torch_dynamo_backends").load() is backend


@pytest.mark.own_kernels
@torch.no_grad()
def test_values_are_those_of_compile() -> None:
    model, x = quantized(Linears()), torch.randn(4, 32)
    other = qfuse.compile(
        copy.deepcopy(model), (x,), options={"backend": "eager"}, target=OPTIONS["target"]
    )
    compiled = fast(model)

    for _ in range(3):
        assert torch.equal(compiled(x), other(x))
    assert model.calls.item() == 3
    (report,) = qfuse.reports(compiled)
    assert report.fired == other.report.fired
    assert report.kernels == other.report.kernels
    assert report.facts.entry_point == "torch.compile"
    assert "second" in {event.place.module for event in report.fused}


@pytest.mark.own_kernels
@torch.no_grad()
def test_graph_breaks_and_other_sizes() -> None:
    model = quantized(Linears(breaks=True))
    twin = copy.deepcopy(model)
    compiled = fast(model)

    for rows in (4, 7, 9, 11):
        x = torch.randn(rows, 32)
        torch.testing.assert_close(compiled(x), twin(x))
    # Two graphs for the first size, and two for all others; the last of these is compiled again,
    # because the other graph writes a buffer that it reads.
    assert kernels(compiled) == [1, 1, 1, 1, 1]
    assert model.calls.item() == 4


@pytest.mark.own_kernels
@torch.no_grad()
def test_sizes_that_are_marked_need_one_graph() -> None:
    model = quantized(Linears())
    twin, compiled, x = copy.deepcopy(model), fast(model), torch.randn(4, 32)
    mark_dynamic(x, 0)

    for rows in (4, 7, 300):
        x = x if rows == 4 else torch.randn(rows, 32)
        torch.testing.assert_close(compiled(x), twin(x))
    assert kernels(compiled) == [2]


@torch.no_grad()
def test_a_size_that_the_model_fixes_is_told_of_only_if_it_was_asked_for() -> None:
    model = quantized(Linears())
    compiled: Any = torch.compile(model, backend=backend, options=OPTIONS, dynamic=True)
    compiled(torch.randn(4, 32))

    (report,) = qfuse.reports(compiled)
    assert [note.text for note in report.notes if "dynamic" in note.text] == []


@torch.no_grad()
def test_containers_and_keywords() -> None:
    linear = quantized(nn.Sequential(nn.Linear(32, 32)))

    def call(pair: tuple[torch.Tensor, dict[str, torch.Tensor]], *, scale: float = 1.0) -> Any:
        x, more = pair
        return {"sum": linear(x) + more["y"], "rows": x.shape[0], "list": [x * scale, None]}

    x, y = torch.randn(3, 32), torch.randn(3, 32)
    have, want = fast(call)((x, {"y": y}), scale=2.0), call((x, {"y": y}), scale=2.0)
    torch.testing.assert_close(have["sum"], want["sum"])
    assert have["rows"] == 3
    assert torch.equal(have["list"][0], x * 2)
    assert have["list"][1] is None


@pytest.mark.own_kernels
@torch.no_grad()
def test_reports_are_told_apart() -> None:
    first, second = fast(quantized(Linears())), fast(quantized(Linears(breaks=True)))
    x = torch.randn(4, 32)
    first(x)
    second(x)

    assert kernels(first) == [2]
    assert kernels(second) == [1, 1]
    assert len(qfuse.reports()) == 3
    with pytest.raises(qfuse.OptionsError, match="a Linear has no reports"):
        qfuse.reports(nn.Linear(2, 2))
    qfuse.clear_reports()
    assert qfuse.reports() == qfuse.reports(first) == ()


@pytest.mark.own_kernels
@torch.no_grad()
def test_a_function_and_a_module_compiled_in_place_have_reports() -> None:
    linear = quantized(nn.Sequential(nn.Linear(32, 32)))
    x = torch.randn(3, 32)
    function = fast(lambda x: linear(x) + 1)
    function(x)
    model = quantized(Linears())
    model.compile(backend=backend, options=OPTIONS)
    model(x)

    assert kernels(function) == [1]
    assert kernels(model) == [2]


@torch.no_grad()
def test_changed_weights_are_seen() -> None:
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    compiled, x = fast(model), torch.randn(3, 8)
    compiled(x)
    weight = model.get_parameter("0.weight")
    weight.mul_(2)
    torch.testing.assert_close(compiled(x), model(x))
    model.load_state_dict({"0.weight": torch.ones(8, 8), "0.bias": torch.zeros(8)})
    torch.testing.assert_close(compiled(x), model(x))
    model[0].bias = nn.Parameter(torch.ones(8))
    torch.testing.assert_close(compiled(x), model(x))

    assert len(qfuse.reports(compiled)) == 4


@torch.no_grad()
def test_threads_that_see_a_change_compile_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    compiled, x = fast(model), torch.randn(3, 8)
    compiled(x)
    model.get_parameter("0.weight").mul_(2)
    with torch.no_grad(), ThreadPoolExecutor(4) as pool:
        results = list(pool.map(torch.no_grad()(lambda _: compiled(x)), range(8)))

    for result in results:
        torch.testing.assert_close(result, model(x))
    assert len(qfuse.reports(compiled)) == 2


@torch.no_grad()
def test_weights_that_keep_changing_end_the_compiling() -> None:
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    compiled, x = fast(model), torch.randn(3, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(10):
            model.get_parameter("0.weight").mul_(1.5)
            torch.testing.assert_close(compiled(x), model(x))

    told = [str(w.message) for w in caught if "eagerly" in str(w.message)]
    assert told == ["its weights were changed 8 times, so a graph runs eagerly"]


@torch.no_grad()
def test_a_graph_that_cannot_be_captured_runs_eagerly() -> None:
    linear = nn.Linear(8, 8)

    def call(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.cond(x.sum() > 0, linear, torch.relu, (x,))
        return out

    compiled, x = fast(call), torch.ones(2, 8)
    with pytest.warns(UserWarning, match="a graph runs eagerly: the model calls cond"):
        have = compiled(x)

    assert torch.equal(have, linear(x))
    (report,) = qfuse.reports(compiled)
    assert report.facts.backend == "none (this graph runs eagerly)"
    assert "the model calls cond" in report.notes[0].text


@torch.no_grad()
def test_a_number_that_varies_runs_eagerly() -> None:
    compiled, x = fast(lambda x, n: x * n), torch.randn(3)
    compiled(x, 2)
    with pytest.warns(UserWarning, match="a number that varies and is not the size of a tensor"):
        assert torch.equal(compiled(x, 3), x * 3)


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chek": "site"}, "unknown option 'chek'\n  do: the options are backend, .*check"),
        ({"check": "sometimes"}, "check='sometimes' is not one of"),
        ({"float_dtype": torch.float16}, "float_dtype=torch.float16 is not supported"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message) as caught:
        torch.compile(nn.Linear(2, 2), backend=backend, options=options)(torch.randn(1, 2))
    assert "OptionsError" in f"{caught.value!r} {caught.value.__cause__!r}"


@torch.no_grad()
def test_modes_are_refused() -> None:
    with pytest.raises(Exception, match="mode='reduce-overhead' is a mode of Inductor"):
        torch.compile(nn.Linear(2, 2), backend=backend, mode="reduce-overhead")(torch.randn(1, 2))


def test_training_is_refused() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(
        Exception, match=r"requires grad.*\n  do: call the model under torch.no_grad"
    ):
        fast(nn.Linear(8, 8).eval())(x.clone().requires_grad_())
    with pytest.raises(Exception, match=r"is in training mode.*\n  do: call model.eval"):
        fast(nn.Linear(8, 8))(x)
    with (
        pytest.raises(Exception, match=r"captured in training mode(.|\n)*do: call model.eval"),
        torch.no_grad(),
    ):
        fast(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)))(x)


def test_a_model_in_eval_mode_needs_no_no_grad() -> None:
    model, x = nn.Linear(8, 8).eval(), torch.randn(2, 8)
    have = fast(model)(x)

    assert not have.requires_grad
    torch.testing.assert_close(have, model(x).detach())


@torch.no_grad()
def test_a_compiled_part_runs_inside() -> None:
    x = torch.randn(3, 8)
    part = qfuse.compile(
        nn.Linear(8, 8).eval(), (x,), options={"backend": "eager"}, target=OPTIONS["target"]
    )
    model = nn.Sequential(part, nn.ReLU()).eval()

    assert torch.equal(fast(model)(x), torch.relu(part(x)))
    assert torch.equal(torch.compile(model, backend="eager")(x), torch.relu(part(x)))


@torch.no_grad()
def test_writes_to_inputs_reach_the_caller() -> None:
    def call(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache[:, 1] = x
        return cache.sum(1)

    x, cache = torch.ones(3), torch.zeros(3, 2)
    have = fast(call)(x, cache)

    assert torch.equal(have, x)
    assert torch.equal(cache, torch.tensor([[0.0, 1.0]] * 3))


@pytest.mark.slow
@torch.no_grad()
def test_code_is_compiled() -> None:
    if find_compiler() is None:
        pytest.skip("needs a C++ compiler")
    model, x = quantized(Linears()), torch.randn(4, 32)
    twin = copy.deepcopy(model)
    compiled = fast(model, backend="aoti")

    torch.testing.assert_close(compiled(x), twin(x))
    assert qfuse.reports(compiled)[0].facts.backend == "aoti"
