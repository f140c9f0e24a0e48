"""Every node knows the user's line and the module that it comes from."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from pathlib import Path

import torch
from tests.support.graphs.capture_models import Stack, captured, module
from torch import nn

from qfuse.capture.provenance import UserFiles, source_line
from qfuse.ir.graph.stage_graph import place_of


def test_the_users_line_and_the_path_of_the_module() -> None:
    program = captured(Stack().eval(), torch.randn(2, 32))
    linears = program.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    places = [place_of(node) for node in linears]

    assert [p.module for p in places] == [
        "blocks.0.up",
        "blocks.0.down",
        "blocks.1.up",
        "blocks.1.down",
    ]
    file, line, code = places[1].source.split(":", maxsplit=2)
    assert Path(file).name == "capture_models.py"
    assert linecache.getline(file, int(line)).strip() == code.strip()
    assert code.strip() == "y: torch.Tensor = x + self.down(h)"
    # The constants carry the place of what reads them.
    (weight,) = (n for n in program.graph.nodes if n.target == "blocks.1.up.weight")
    assert place_of(weight).module == "blocks.1.up"


def test_the_model_itself_is_no_module_of_its_own() -> None:
    model = module(lambda self, x: self.fc(x) * 2, fc=nn.Linear(3, 3))
    program = captured(model, torch.randn(2, 3))
    paths = [n.meta["qfuse_module"] for n in program.graph.nodes if n.op == "call_function"]

    assert paths == ["fc", ""]


def test_whose_a_file_is() -> None:
    files = UserFiles()
    packages = Path(torch.__file__).parents[1]

    assert files.owns(__file__)
    assert files.owns(str(packages / "transformers/models/llama/modeling_llama.py"))
    assert not files.owns(str(packages / "torch/nn/modules/linear.py"))
    assert not files.owns(str(packages / "torchao/quantization/quant_api.py"))
    assert not files.owns(sys.modules["qfuse.capture.capture"].__file__ or "")
    assert not files.owns(f"{sysconfig.get_path('stdlib')}/contextlib.py")
    assert not files.owns("<eval_with_key>.3")
    assert not files.owns("torch/fx/passes/runtime_assert.py")


def test_the_deepest_frame_of_the_users() -> None:
    trace = (
        'File "/m/model.py", line 3, in forward\n    y = self.block(x)\n'
        '  File "/m/block.py", line 7, in forward\n    h = self.fc(\n'
        f'  File "{torch.nn.__file__}", line 134, in forward\n    return F.linear(x)\n           ^^^'
    )
    assert source_line(trace, UserFiles()) == "/m/block.py:7: h = self.fc("
    assert source_line('File "<eval_with_key>.1", line 3, in forward', UserFiles()) is None
    assert source_line(None, UserFiles()) is None


def test_the_line_of_a_method_that_forward_calls() -> None:
    class Steps(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x + 1)

        def block(self, x: torch.Tensor) -> torch.Tensor:
            return self.rounded(x) * 2

        def rounded(self, x: torch.Tensor) -> torch.Tensor:
            return torch.floor(x)

    program = captured(Steps().eval(), torch.randn(2, 3))
    lines = {
        place_of(node).op: place_of(node).source.split(": ", maxsplit=1)[1]
        for node in program.graph.nodes
        if node.op == "call_function"
    }

    assert lines == {
        "aten.add.Tensor": "return self.block(x + 1)",
        "aten.floor": "return torch.floor(x)",
        "aten.mul.Tensor": "return self.rounded(x) * 2",
    }


def test_own_files_come_before_libraries_within_the_innermost_layer() -> None:
    packages = Path(torch.__file__).parents[1]

    def trace(*frames: tuple[str, str]) -> str | None:
        lines = (f'File "{file}", line 3, in {name}\n  in {file}' for file, name in frames)
        found = source_line("\n".join(lines), UserFiles())
        return found and Path(found.partition(":")[0]).name

    mine, library, tools = "/m/model.py", f"{packages}/timm/vit.py", f"{packages}/einops/ops.py"

    assert trace((mine, "forward"), (tools, "rearrange")) == "model.py"
    assert trace((mine, "forward"), (library, "forward"), (library, "scaled")) == "vit.py"
    assert trace((library, "forward"), ("/m/attention.py", "attend")) == "attention.py"
    assert trace((library, "forward"), (tools, "rearrange")) == "ops.py"


class Exported(nn.Module):
    """A model with a graph inside, as PT2E makes one."""

    def __init__(self, inner: nn.Module, *args: torch.Tensor) -> None:
        super().__init__()
        self.body = torch.export.export(inner, args).module()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x))


def places(model: nn.Module, *args: torch.Tensor) -> list[tuple[str, str, str]]:
    """Op, module and the text of the line of every call."""
    nodes = [n for n in captured(model, *args).graph.nodes if n.op == "call_function"]
    found = [place_of(node) for node in nodes]
    return [(p.op, p.module, p.source.rpartition(": ")[2]) for p in found]


def test_the_nodes_of_a_graph_inside_the_model_keep_their_lines_and_modules() -> None:
    x = torch.randn(2, 32)
    alone = places(Stack().eval(), x)
    inside = places(Exported(Stack().eval(), x), x)

    assert len({place for place in alone if place[0] == "aten.linear"}) == 4
    assert inside[:-1] == [
        (op, f"body.{path}" if path else "body", code) for op, path, code in alone
    ]
    assert inside[-1] == ("aten.relu", "", "return torch.relu(self.body(x))")


def test_what_a_quantizer_inserted_has_the_line_of_its_user() -> None:
    x = torch.randn(2, 32)
    model = Exported(Stack().eval(), x)
    graph = model.body.graph
    for linear in graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
        with graph.inserting_before(linear):
            linear.args = (
                graph.call_function(torch.ops.aten.neg.default, linear.args[:1]),
                *linear.args[1:],
            )
    model.body.recompile()
    found = places(model, x)
    linears = [place[1:] for place in found if place[0] == "aten.linear"]

    assert [place[1:] for place in found if place[0] == "aten.neg"] == linears


def test_several_graphs_are_told_apart() -> None:
    x = torch.randn(2, 32)
    one, two = Exported(Stack().eval(), x), Exported(Stack().eval(), x)
    found = places(nn.Sequential(one, two), x)
    paths = [path for op, path, _ in found if op == "aten.linear"]

    below = ("body.blocks.0.up", "body.blocks.0.down", "body.blocks.1.up", "body.blocks.1.down")
    assert paths == [f"{number}.{path}" for number in (0, 1) for path in below]


def test_a_graph_without_lines_of_its_own_has_that_of_the_call() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    for node in traced.graph.nodes:
        node.meta.clear()
    model = module(lambda self, x: self.body(x) * 2, body=traced)
    found = places(model, torch.randn(2, 4))

    assert [op for op, _, _ in found] == ["aten.linear", "aten.relu", "aten.mul.Tensor"]
    assert [path for _, path, _ in found] == ["body.0", "body.1", ""]


def test_a_graph_that_was_edited_after_its_code_was_written_is_captured() -> None:
    x = torch.randn(2, 32)
    model = Exported(Stack().eval(), x)
    output = model.body.graph.output_node()
    (result,) = output.all_input_nodes
    output.replace_input_with(result, result.all_input_nodes[0])
    model.body.graph.erase_node(result)

    assert places(model, x)[-1] == ("aten.relu", "", "return torch.relu(self.body(x))")
