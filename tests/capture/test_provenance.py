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
