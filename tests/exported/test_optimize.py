"""An optimized program is called, saved, loaded and packaged like its source."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram

import qfuse
from qfuse.exported import optimize
from qfuse.targets import Target

TARGET = Target.for_testing()
WITHOUT = {"own_kernels": False}
QUIET = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


class Stateful(nn.Module):
    """Quantized linears, a buffer and an input that are written, and results of every kind."""

    calls: torch.Tensor

    def __init__(self, *, persistent: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 32)
        self.register_buffer("calls", torch.zeros(1), persistent=persistent)

    def forward(self, x: torch.Tensor, *, more: dict[str, torch.Tensor], n: int = 3) -> Any:
        y = torch.relu(self.first(x))
        self.calls.add_(1)
        more["cache"].add_(1)
        out = self.second(y) + more["bias"]
        size = x.shape[0] * 2 + 1
        return {"y": out, "calls": self.calls + 0, "size": size, "cache": more["cache"], "n": n}


def more() -> dict[str, torch.Tensor]:
    return {"bias": torch.linspace(0, 1, 32), "cache": torch.zeros(2)}


def quantized(model: nn.Module) -> Any:
    from torchao.quantization import (  # noqa: PLC0415 - takes a second
        Int8DynamicActivationInt8WeightConfig,
        quantize_,
    )

    quantize_(model.eval(), Int8DynamicActivationInt8WeightConfig())
    return model


def exported(model: nn.Module) -> ExportedProgram:
    rows = Dim("rows", min=1, max=64)
    shapes = {"x": {0: rows}, "more": {"bias": None, "cache": None}, "n": None}
    return torch.export.export(
        model, (torch.randn(8, 64),), {"more": more(), "n": 3}, dynamic_shapes=shapes
    )


def reloaded(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def namespaces(program: ExportedProgram) -> set[str]:
    calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
    return {call.namespace for call in calls if isinstance(call, OpOverload)}


WAYS: dict[str, Callable[[ExportedProgram], ExportedProgram]] = {
    "as it is": lambda program: program,
    "saved": reloaded,
    "decomposed": lambda program: program.run_decompositions(),
}


@QUIET
@torch.no_grad()
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_it_is_called_like_its_source(way: Callable[[ExportedProgram], ExportedProgram]) -> None:
    model = quantized(Stateful())
    program = exported(model)
    fast = way(optimize(program, target=TARGET, options=WITHOUT)).module()
    plain = program.module()

    for rows in (8, 3, 1, 64):
        x, ours, theirs = torch.randn(rows, 64), more(), more()
        have, want = fast(x, more=ours, n=3), plain(x, more=theirs, n=3)
        torch.testing.assert_close(have["y"], want["y"])
        assert torch.equal(have["calls"], want["calls"])
        assert torch.equal(ours["cache"], theirs["cache"])
        assert torch.equal(have["cache"], want["cache"])
        assert (have["size"], have["n"]) == (2 * rows + 1, 3)
    with pytest.raises((RuntimeError, AssertionError)):
        fast(torch.randn(65, 64), more=more(), n=3)


@QUIET
def test_it_has_ops_of_aten_alone_without_kernels_of_qfuse() -> None:
    program = exported(quantized(Stateful()))
    fast = optimize(program, target=TARGET, options=WITHOUT)

    assert namespaces(fast) == {"aten"}
    (report,) = qfuse.reports(fast)
    assert set(report.kernels) == {"expand"}


@QUIET
def test_the_signature_and_the_state_are_kept() -> None:
    program = exported(quantized(Stateful(persistent=False)))
    fast = optimize(program, target=TARGET, options=WITHOUT)
    old, new = program.run_decompositions({}).graph_signature, fast.graph_signature

    assert new.user_inputs == old.user_inputs
    assert list(new.buffers_to_mutate.values()) == ["calls"]
    assert list(new.user_inputs_to_mutate.values()) == list(old.user_inputs_to_mutate.values())
    assert fast.call_spec.in_spec == program.call_spec.in_spec
    assert fast.call_spec.out_spec == program.call_spec.out_spec
    assert set(new.non_persistent_buffers) == {"calls"}
    assert "calls" not in fast.state_dict
    before = program.constants["calls"].clone()
    fast.module()(torch.randn(8, 64), more=more(), n=3)
    assert torch.equal(program.constants["calls"], before)


@QUIET
@pytest.mark.own_kernels
def test_weights_are_quantized_ones() -> None:
    program = exported(quantized(Stateful()))
    fast = optimize(program, target=TARGET)
    floats = 64 * 64 + 64 * 32

    held = sum(t.nbytes for t in fast.state_dict.values())
    assert floats <= held < 2 * floats
    packed = [t for t in fast.state_dict.values() if t.nbytes >= 32 * 64]
    assert {t.dtype for t in packed} == {torch.int8}


@QUIET
@torch.no_grad()
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_results_keep_the_order_of_their_axes(layout: torch.memory_format) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU()).eval()
    x = torch.randn(2, 4, 8, 8).contiguous(memory_format=layout)
    program = torch.export.export(model, (x,))
    have, want = optimize(program, target=TARGET).module()(x), model(x)

    torch.testing.assert_close(have, want)
    assert have.stride() == want.stride()


def test_a_program_without_an_example_needs_one() -> None:
    x = torch.randn(2, 4)
    program = torch.export.export(nn.Linear(4, 4).eval(), (x,))
    program.example_inputs = None
    with pytest.raises(qfuse.InputError, match="input"):
        optimize(program, target=TARGET)
    assert torch.equal(optimize(program, (x,), target=TARGET).module()(x), program.module()(x))


def test_it_has_the_name_of_a_stage() -> None:
    assert qfuse.optimize is optimize


def test_refusals() -> None:
    with pytest.raises(qfuse.OptionsError, match=r"the program is a Linear\n  do: pass the result"):
        optimize(nn.Linear(2, 2))  # type: ignore[arg-type]
    program = torch.export.export(nn.Linear(4, 4).eval(), (torch.randn(2, 4),))
    with pytest.raises(qfuse.OptionsError, match="not one of"):
        optimize(program, options={"backend": "nobody"})
    assert qfuse.reports(optimize(program, target=TARGET))[0].facts.check == "pipeline"
    with pytest.raises(qfuse.OptionsError, match="an ExportedProgram has no reports"):
        qfuse.reports(program)


_LOAD = """
import sys, torch, qfuse
qfuse.kernels.load()
program = torch.export.load(sys.argv[1])
x, want = torch.load(sys.argv[2])
assert torch.equal(program.module()(x), want)
package = torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[3])
assert torch.equal(torch._inductor.aoti_load_package(package)(x), want)
assert "transformers" not in sys.modules and "torchao" not in sys.modules
"""


@pytest.mark.thorough
@QUIET
@pytest.mark.slow
@pytest.mark.own_kernels
@pytest.mark.compiler
@torch.no_grad()
def test_another_process_loads_and_packages_it(tmp_path: Path) -> None:
    model, x = quantized(nn.Sequential(nn.Linear(64, 64), nn.ReLU())), torch.randn(8, 64)
    fast = optimize(torch.export.export(copy.deepcopy(model), (x,)))
    assert namespaces(fast) == {"aten", "qfuse"}
    torch.export.save(fast, tmp_path / "fast.pt2")
    torch.save((x, fast.module()(x)), tmp_path / "values.pt")

    torch.testing.assert_close(fast.module()(x), model(x))
    files = [str(tmp_path / name) for name in ("fast.pt2", "values.pt", "package.pt2")]
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, *files], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@QUIET
def test_an_input_with_the_name_of_a_builtin_survives_decompositions() -> None:
    # The input of `nn.Sequential` is called `input`, which FX would rename.
    model, x = quantized(nn.Sequential(nn.Linear(64, 64))), torch.randn(32, 64)
    fast = optimize(torch.export.export(model, (x,)), options=WITHOUT, target=TARGET)

    again = fast.run_decompositions({})

    assert fast.graph_signature.user_inputs == again.graph_signature.user_inputs == ("input",)
    assert torch.equal(again.module()(x), fast.module()(x))


class Keeps(nn.Module):
    """A model that writes a buffer and never reads it."""

    kept: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 32)
        self.register_buffer("kept", torch.zeros(8, 32))

    def forward(self, x: torch.Tensor) -> None:
        self.kept.copy_(self.linear(x))


@QUIET
def test_a_buffer_that_is_only_written() -> None:
    model, x = quantized(Keeps()), torch.randn(8, 64)
    program = optimize(torch.export.export(model, (x,)), target=TARGET, options=WITHOUT)
    fast = program.module()
    assert fast(x) is None
    model(x)
    torch.testing.assert_close(fast.get_buffer("kept"), model.kept)
