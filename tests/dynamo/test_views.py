"""Results that share memory still share it after a graph break, where code writes to them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.dynamo._dynamo_api import graph_break, mark_dynamic
from tests.dynamo.test_backend import quantized
from torch import nn

import qfuse
from qfuse.dynamo import backend
from qfuse.targets import Target

OPTIONS: dict[str, Any] = {"backend": "eager", "target": Target.for_testing()}


class Model(nn.Module):
    """An int8 linear, and buffers."""

    cache: torch.Tensor
    weight: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(6, 8))
        self.register_buffer("weight", torch.randint(-127, 128, (8, 8), dtype=torch.int8))

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.float() * 0.01)


class OfAnInput(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part, y = x[:, 2:], self.linear(x)
        graph_break()
        part.zero_()
        return y + x


class OfAnInputTurned(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned, (_, part) = x.t(), torch.split(x, 4, 1)
        y = self.linear(x)
        graph_break()
        turned[0] = 1.0
        part.mul_(2)
        return y + x


class OfAnInputThatIsWritten(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = x.add_(1)[1:]
        y = self.linear(x)
        graph_break()
        part.add_(y[1:])
        return y


class OfAResult(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        part = y[:, 3:]
        graph_break()
        part.zero_()
        return y


class OfAResultWrittenBefore(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        part = y[:, 3:]
        y.add_(1)
        part.mul_(2)
        graph_break()
        part.add_(y[:, :5])
        return y + part.sum()


class OfWhatIsNotReturned(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        first, second, (third, _) = y[:, :5], y.t()[3:], y.chunk(2, 1)
        graph_break()
        first.zero_()
        third.sub_(1)
        return second + 1


class OfABuffer(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, y = self.cache[: x.shape[0]], self.linear(x)
        graph_break()
        rows.copy_(y)
        return self.cache.sum(1)


class OfABufferThatIsRead(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, y = self.cache[: x.shape[0]], self.linear(x)
        graph_break()
        rows.copy_(y)
        return rows @ self.cache.t()


class OfABufferThatIsWritten(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, y = self.cache[: x.shape[0]], self.linear(x)
        graph_break()
        self.cache.add_(1)
        return rows + y


class OfNothingElse(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = x[1:]
        graph_break()
        part.zero_()
        return self.linear(x)


class OfOnePart(Model):
    """Code after the break would fail if the part did not have the strides of a part."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = self.linear(x).view(-1, 4, 2)[:, 1:].transpose(0, 1)
        graph_break()
        assert not part.is_contiguous()
        assert part.stride() == (2, 8, 1)
        return part.flatten(1)


class OfOneExpanded(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.linear(x).sum(1, keepdim=True).expand(-1, 5)
        graph_break()
        assert wide.stride(1) == 0
        return wide + wide.t().sum()


SHARING = (
    OfAnInput,
    OfAnInputTurned,
    OfAnInputThatIsWritten,
    OfAResult,
    OfAResultWrittenBefore,
    OfWhatIsNotReturned,
    OfABuffer,
    OfABufferThatIsRead,
    OfABufferThatIsWritten,
    OfNothingElse,
    OfOneExpanded,
    OfOnePart,
)


class OfOneOfTwo(Model):
    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        part, y = other[1:], self.linear(x)
        graph_break()
        part.add_(1)
        return y[1:] + other[1:] + part


def assert_compiled(compiled: Any) -> None:
    """Assert that the first graph, which ends at the break, is compiled."""
    first = qfuse.reports(compiled)[0].facts
    assert first.backend == "eager", "it runs op by op, after qfuse's passes"


def check(model: Model, compiled: Any, x: torch.Tensor) -> None:
    """Assert that results, the input and the buffer are those of the source after two calls."""
    source = copy.deepcopy(model)
    own, other = x.clone(), x.clone()
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(own), source(other))
            torch.testing.assert_close(own, other)
            torch.testing.assert_close(model.cache, source.cache)


@pytest.mark.filterwarnings("ignore:a (graph|call) runs eagerly:UserWarning")
@pytest.mark.parametrize("of", SHARING)
def test_a_write_after_a_graph_break_is_seen(of: type[Model]) -> None:
    model = of().eval()
    compiled = torch.compile(model, backend=backend, options=OPTIONS)

    check(model, compiled, torch.randn(4, 8))

    assert_compiled(compiled)


@pytest.mark.filterwarnings("ignore:a (graph|call) runs eagerly:UserWarning")
@pytest.mark.parametrize("of", [OfAnInput, OfAResultWrittenBefore, OfWhatIsNotReturned, OfOnePart])
def test_sizes_may_vary(of: type[Model]) -> None:
    model = of().eval()
    compiled = torch.compile(model, backend=backend, options=OPTIONS)
    for rows in (4, 3, 6):
        x = torch.randn(rows, 8)
        mark_dynamic(x, 0)
        check(model, compiled, x)
    assert_compiled(compiled)
    notes = [note.text for report in qfuse.reports(compiled) for note in report.notes]
    assert not [text for text in notes if "a call runs eagerly" in text]


@pytest.mark.filterwarnings("ignore:a (graph|call) runs eagerly:UserWarning")
def test_the_input_may_be_a_part_of_a_tensor() -> None:
    model = OfAnInput().eval()
    compiled = torch.compile(model, backend=backend, options=OPTIONS)
    whole = torch.randn(6, 8)
    expected = whole.clone()
    with torch.no_grad():
        compiled(whole[1:5])
        model(expected[1:5])

    assert torch.equal(whole, expected)
    assert whole[0].all()
    assert_compiled(compiled)


@pytest.mark.filterwarnings("ignore:a (graph|call) runs eagerly:UserWarning")
def test_inputs_may_share_memory_in_one_call_only() -> None:
    model = OfOneOfTwo().eval()
    compiled = torch.compile(model, backend=backend, options=OPTIONS)

    def calls() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        x = torch.randn(4, 8)
        yield x, x.view(4, 8)
        yield torch.randn(4, 8), torch.randn(4, 8)
        arena = torch.randn(20, 8)
        yield arena[:4], arena[2:6]
        yield arena[:4], arena[14:18]

    with torch.no_grad():
        for inputs in calls():
            own = copy.deepcopy(inputs)
            torch.testing.assert_close(compiled(*own), model(*inputs))
            torch.testing.assert_close(own, inputs)
    assert_compiled(compiled)


def test_weights_may_be_tensors_of_torchao() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            y: torch.Tensor = self.linear(x)
            return y

    model, x = quantized(Written()), torch.randn(4, 32)
    with torch.no_grad():
        expected = model(x.clone())
        compiled: Any = torch.compile(model, backend=backend, options=OPTIONS)
        y = compiled(own := x.clone())

    assert qfuse.reports()[0].facts.backend == "eager"
    torch.testing.assert_close(y, expected)
    assert torch.equal(own, x + 1)


def test_views_in_another_dtype_run_eagerly() -> None:
    class Bits(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            bits = y.view(torch.int32)
            graph_break()
            bits.zero_()
            return y

    model = Bits().eval()
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        y = torch.compile(model, backend=backend, options=OPTIONS)(torch.randn(4, 8))

    assert not y.any()
    assert any("as torch.int32 of torch.float32" in str(w.message) for w in caught)


@pytest.mark.parametrize("view", [lambda x: x[:, 2:], lambda x: x.view(-1)])
def test_inputs_that_overlap_and_are_written_run_eagerly(view: Any) -> None:
    def forward(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        part.zero_()
        return x + 1

    x = torch.randn(4, 8)
    compiled = torch.compile(forward, backend=backend, options=OPTIONS)
    with pytest.warns(UserWarning, match=r"runs eagerly: part shares memory with x, and the mod"):
        y = compiled(x, view(x))

    assert not view(x).any()
    assert torch.equal(y, x + 1)


def test_inputs_have_the_names_of_the_user() -> None:
    def forward(of: dict[str, list[torch.Tensor]], *rest: torch.Tensor) -> torch.Tensor:
        rest[0].add_(1)
        return of["k"][0] + 1

    x = torch.randn(4, 8)
    compiled = torch.compile(forward, backend=backend, options=OPTIONS)
    with pytest.warns(UserWarning, match=r"eagerly: rest_0 shares memory with of_k_0,"):
        compiled({"k": [x]}, x[:2])


@pytest.mark.parametrize("name", ["torch", "inf", "nan", "device", "input", "float"])
def test_names_that_generated_code_uses(name: str) -> None:
    scope: dict[str, Any] = {"where": torch.where}
    exec(f"def forward(x, {name}): return where({name} > 0, x, -1e400).relu()", scope)
    x, mask = torch.randn(4, 8), torch.randn(4, 8)
    compiled: Any = torch.compile(scope["forward"], backend=backend, options=OPTIONS)

    assert torch.equal(compiled(x, mask), scope["forward"](x, mask))
    assert_compiled(compiled)
