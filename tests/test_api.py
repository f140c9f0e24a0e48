"""What the ways in say to what they cannot take."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qfuse
from qfuse.ir.errors import CaptureError, OptionsError, OutOfMemoryError

EAGER = {"backend": "eager"}


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"options": 3}, "mapping"),
        ({"options": {"backends": "eager"}}, "unknown option"),
        ({"options": {"without": "merge-linears"}}, "list of names"),
        ({"options": {"without": ["merge"]}}, "unknown rewrite 'merge'"),
        ({"progress": 3}, "progress"),
        ({"dynamic_shapes": 3}, "dynamic_shapes"),
        ({"check": "maybe"}, "check"),
        ({"float_dtype": torch.int8}, "float_dtype"),
        ({"target": "cpu"}, "target"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named(given: dict[str, Any], word: str) -> None:
    with pytest.raises(OptionsError, match=word):
        qfuse.compile(nn.Linear(4, 4).eval(), (torch.randn(2, 4),), **given)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"backend": "fast"}, "backend='fast' is not one of 'auto', 'aoti', 'eager'"),
        ({"cache": 1}, "'cache' must be a bool"),
        ({"own_kernels": "no"}, "'own_kernels' must be a bool"),
        ({"without": "merge-linears"}, "list of names"),
        ({"threads": 0}, "threads must be a number from 1"),
    ],
    ids=str,
)
def test_a_wrong_option_is_named(given: dict[str, Any], word: str) -> None:
    with pytest.raises(OptionsError, match=word):
        qfuse.Options(**given)
    with pytest.raises(OptionsError, match=word):
        qfuse.Options.of(given)


def test_options_are_given_by_name_or_by_member() -> None:
    assert qfuse.Options(backend="eager") == qfuse.Options.of(EAGER)


@pytest.mark.parametrize("x", [torch.ones(2, 4), torch.ones(2, 4, dtype=torch.int64)], ids=str)
def test_examples_of_another_type_than_the_model(x: torch.Tensor) -> None:
    with pytest.raises(CaptureError, match="example inputs") as raised:
        qfuse.compile(nn.Linear(4, 4).double().eval(), (x,), options=EAGER)
    assert "While executing" not in str(raised.value)


class QuantizesAProductOfTwoTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) / 0.1
        return y.round().clamp(-128, 127).to(torch.int8)


@pytest.mark.parametrize("check", ["site", "pipeline"])
def test_a_model_that_does_not_run_is_told_apart_from_a_rewrite(check: str) -> None:
    model = QuantizesAProductOfTwoTypes().eval()
    with pytest.raises(CaptureError, match=r"does not run on its example inputs.*dtype"):
        qfuse.compile(model, (torch.ones(2, 4),), options=EAGER, check=check)


@pytest.mark.parametrize("work", [qfuse.compile, qfuse.explain])
def test_threads_that_compile_take_turns(work: Any) -> None:
    x = torch.randn(2, 4)

    def one(seed: int) -> bool:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
        made = work(model, (x,), options=EAGER)
        return isinstance(made, qfuse.Report) or torch.equal(made(x), model(x))

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(one, range(3))) == [True] * 3


def test_a_compiled_model_says_what_it_is() -> None:
    fast = qfuse.compile(nn.Linear(4, 4).eval(), (torch.randn(2, 4),), options=EAGER)
    assert repr(fast) == (
        "<CompiledModel(input): 0 quantized ops on kernels, 0 expanded, "
        "0 quantize/dequantize left; eager>"
    )


def test_a_model_without_values() -> None:
    model, x = nn.Linear(4, 4, device="meta").eval(), torch.randn(2, 4)
    with pytest.raises(CaptureError, match=r"^weight is on the meta device") as raised:
        qfuse.compile(model, (x,), options=EAGER)
    assert "load_state_dict(weights, assign=True)" in str(raised.value.fix)

    weights = {"weight": torch.ones(4, 4), "bias": torch.ones(4)}
    model.load_state_dict(weights, assign=True)
    assert torch.equal(qfuse.compile(model, (x,), options=EAGER)(x), model(x))


class Counts(nn.Module):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return x + 1


@pytest.mark.parametrize("backend", ["eager", "auto"])
def test_no_update_is_lost_among_threads(backend: str) -> None:
    model = Counts().eval()
    x = torch.randn(3)
    fast = qfuse.compile(model, (x,), options={"backend": backend})
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: fast(x), range(200)))
    (seen,) = fast.runner.written([x])
    assert int(seen) == 200


def test_threads_are_those_of_the_model_and_of_its_plan() -> None:
    before = torch.get_num_threads()
    options = {**EAGER, "own_kernels": False, "threads": before + 2}

    fast = qfuse.compile(nn.Linear(4, 4).eval(), (torch.randn(2, 4),), options=options)

    assert fast.threads == before + 2
    assert fast.report.facts.target is not None
    assert fast.report.facts.target.threads == before + 2
    assert torch.get_num_threads() == before
    again = pickle.loads(pickle.dumps(fast))
    assert again.threads == before + 2
    assert again.with_threads(None).threads is None


def test_a_loaded_model_has_the_threads_that_it_is_given(tmp_path: Path) -> None:
    options = {**EAGER, "own_kernels": False, "threads": 3}
    fast = qfuse.compile(nn.Linear(4, 4).eval(), (torch.randn(2, 4),), options=options)
    fast.save(tmp_path / "model.qfuse")

    assert qfuse.load(tmp_path / "model.qfuse").threads is None
    assert qfuse.load(tmp_path / "model.qfuse", threads=2).threads == 2
    with pytest.raises(OptionsError, match="threads must be a number from 1"):
        qfuse.load(tmp_path / "model.qfuse", threads=0)


class Starving(nn.Module):
    """Finds no memory when it is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Under torch.export its values are not made, and its sum is that of four.
        return x + torch.empty(1 << 58).narrow(0, 0, 4)


def test_a_lack_of_memory_is_no_fault_of_the_model() -> None:
    with pytest.raises(OutOfMemoryError, match="memory ran out while compiling") as raised:
        qfuse.compile(Starving().eval(), (torch.randn(4),), options=EAGER)

    assert "you tried to allocate" in str(raised.value)


def test_a_model_without_example_inputs_is_told_what_to_give() -> None:
    with pytest.raises(CaptureError, match="there are no example inputs, and Linear") as raised:
        qfuse.compile(nn.Linear(4, 4).eval(), options=EAGER)

    assert "returns (model, (x,))" in str(raised.value)
