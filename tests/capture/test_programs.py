"""Programs of torch.export, fresh or from a file, and converted graph modules."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from tests.support.graphs.capture_models import (
    Stack,
    assert_same_run,
    captured,
    check_graph,
    module,
)
from torch.export import Dim

from qfuse.capture import capture
from qfuse.ir.errors import CaptureError, InputError
from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.ir.signature.run import run_functional

pytestmark = pytest.mark.numeric

SHAPES = {"x": {0: Dim("tokens", min=1, max=64)}}


def stateful() -> Any:
    def forward(self: Any, x: torch.Tensor, *, scale: float = 2.0, tree: Any = None) -> Any:
        self.b_count.add_(1)
        return {"y": x * scale + tree["a"] * self.b_count, "x": x}

    return module(forward, b_count=torch.zeros(()))


def from_program(program: torch.export.ExportedProgram, *args: Any, **kw: Any) -> CapturedGraph:
    result = capture(program, args, kw)
    check_graph(result)
    return result


def through_a_file(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")
def test_a_program_needs_no_example(strict: bool, decomposed: bool) -> None:
    model = Stack().eval()
    program = torch.export.export(
        model, (torch.randn(4, 32),), dynamic_shapes=SHAPES, strict=strict
    )
    if decomposed:
        program = program.run_decompositions({})
    result = from_program(program)

    assert result.signature.parameters == ("x",)
    (symbol,) = result.signature.symbols.values()
    assert (symbol.low, symbol.high) == (1, 64)
    for tokens in (1, 9):
        assert_same_run(result, model, torch.randn(tokens, 32))
        assert_same_run(result, model, x=torch.randn(tokens, 32))


def test_a_program_writes_its_own_buffers() -> None:
    model, twin = stateful(), stateful()
    tree = {"a": torch.randn(3)}
    program = torch.export.export(model, (torch.randn(3),), {"tree": tree, "scale": 3.0})
    result = from_program(program)

    x = torch.randn(3)
    assert_same_run(result, twin, x, tree=tree, scale=3.0)
    assert program.state_dict["b_count"] == 1


@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")
def test_a_program_from_a_file() -> None:
    model = stateful()
    kwargs = {"tree": {"a": torch.randn(3)}, "scale": 3.0}
    program = through_a_file(torch.export.export(model, (torch.randn(3),), kwargs))
    result = from_program(program)

    assert_same_run(result, model, torch.randn(3), **kwargs)
    # The line of a source that may be gone is kept as it was.
    assert any("self.b_count.add_(1)" in n.meta.get("qfuse_source", "") for n in result.graph.nodes)


@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")
def test_a_program_with_derived_sizes_from_a_file() -> None:
    # torch's own run_decompositions fails on these.
    model = module(lambda _self, x, y: torch.cat([x, x]) + y)
    half = Dim("half", min=2, max=8)
    shapes = {"x": {0: 4 * half}, "y": {0: 8 * half}}
    program = torch.export.export(model, (torch.randn(12), torch.randn(24)), dynamic_shapes=shapes)
    assert_same_run(from_program(program), model, torch.randn(16), torch.randn(32))
    with pytest.raises(CaptureError, match="before it is saved"):
        capture(through_a_file(program))


@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")
def test_a_program_without_its_example() -> None:
    model = stateful()
    kwargs = {"tree": {"a": torch.randn(3)}, "scale": 3.0}
    program = torch.export.export(model, (torch.randn(3),), kwargs)
    program.example_inputs = None
    result = from_program(program)

    assert [i.name for i in result.signature.inputs] == ["x", "tree['a']", "scale"]


def test_an_example_for_a_program_is_checked() -> None:
    program = torch.export.export(Stack().eval(), (torch.randn(4, 32),))
    from_program(program, torch.randn(4, 32))
    with pytest.raises(InputError, match=r"x: expected float32\[4, 32\], got float32\[5, 32\]"):
        capture(program, (torch.randn(5, 32),))


def test_a_program_has_its_sizes_already() -> None:
    program = torch.export.export(Stack().eval(), (torch.randn(4, 32),))
    with pytest.raises(CaptureError, match="sizes were decided at its export"):
        capture(program, dynamic_shapes=SHAPES)


def test_a_program_knows_no_ambient_autocast() -> None:
    model = Stack().eval()
    program = torch.export.export(model, (torch.randn(4, 32),))
    with torch.autocast("cpu", torch.bfloat16):
        result = from_program(program)
    assert_same_run(result, model, torch.randn(4, 32))


def test_a_program_in_training_mode() -> None:
    model = module(lambda self, x: self.drop(x), drop=torch.nn.Dropout(0.5)).train()
    program = torch.export.export(model, (torch.randn(4),))
    with pytest.raises(CaptureError, match="was captured in training mode"):
        capture(program)


def test_a_program_with_an_input_that_has_gaps() -> None:
    program = torch.export.export(Stack().eval(), (torch.randn(4, 64)[:, ::2],))
    with pytest.raises(CaptureError, match=r"x was exported with strides \(64, 2\).*gaps"):
        capture(program)


def test_a_program_with_a_dynamic_number() -> None:
    model = module(lambda _self, x, k: x * k)
    shapes = {"x": None, "k": Dim.DYNAMIC}
    program = torch.export.export(model, (torch.randn(4), 3), dynamic_shapes=shapes)
    with pytest.raises(CaptureError, match="k is a SymInt"):
        capture(program)


@pytest.mark.parametrize("check_guards", [False, True])
def test_an_exported_module_is_a_model(check_guards: bool) -> None:
    model = Stack().eval()
    program = torch.export.export(model, (torch.randn(4, 32),), dynamic_shapes=SHAPES)
    exported = program.module(check_guards=check_guards)
    result = captured(exported, torch.randn(4, 32), dynamic_shapes=SHAPES)

    assert_same_run(result, model, torch.randn(9, 32))
    assert {n.meta["qfuse_module"] for n in result.graph.nodes if n.op == "call_function"} == {
        *("blocks.0", "blocks.0.up", "blocks.0.down"),
        *("blocks.1", "blocks.1.up", "blocks.1.down"),
    }


def test_an_exported_module_keeps_its_containers() -> None:
    model = stateful()
    kwargs = {"tree": {"a": torch.randn(3)}, "scale": 3.0}
    exported = torch.export.export(model, (torch.randn(3),), kwargs).module()
    result = captured(exported, torch.randn(3), **kwargs)
    x = torch.randn(3)
    _, got = run_functional(result, x, scale=3.0, tree=kwargs["tree"])
    assert got["x"] is x
    assert exported.b_count == 1
