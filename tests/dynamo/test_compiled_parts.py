"""``torch.compile`` of a model with a part that qfuse compiled, and programs that it optimized."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import qfuse
from qfuse.dynamo import backend
from qfuse.ir.errors import CaptureError
from qfuse.targets import Target

OPTIONS: dict[str, Any] = {"backend": "eager", "target": Target.for_testing()}


class Around(nn.Module):
    """Linears before and after a part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.part = part
        self.after = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.after(self.part(torch.relu(self.before(x))))
        return y


def part(runs: str) -> qfuse.CompiledModel:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    return qfuse.compile(model, (torch.randn(3, 8),), options={"backend": runs})


@pytest.mark.own_kernels
@pytest.mark.compiler
@pytest.mark.parametrize("runs", ["aoti", "eager"])
@torch.no_grad()
def test_a_compiled_part_runs_between_the_graphs_around_it(runs: str) -> None:
    model, x = Around(part(runs)).eval(), torch.randn(3, 8)
    compiled = torch.compile(model, backend=backend, options=OPTIONS)

    assert torch.allclose(compiled(x), model(x), atol=1e-5)
    assert len(qfuse.reports(compiled)) == 2
    assert not any("eagerly" in n.text for r in qfuse.reports(compiled) for n in r.notes)


@pytest.mark.own_kernels
@pytest.mark.compiler
@torch.no_grad()
def test_other_backends_and_hooks() -> None:
    model, x = Around(part("aoti")).eval(), torch.randn(3, 8)
    model.part.register_forward_hook(lambda _module, _inputs, result: result * 2)

    compiled = torch.compile(model, backend="eager")

    assert torch.equal(compiled(x), model(x))


@pytest.mark.own_kernels
def test_what_was_optimized_is_refused() -> None:
    from torchao.quantization import (  # noqa: PLC0415 - takes a second
        Int8DynamicActivationInt8WeightConfig,
        quantize_,
    )

    model, x = nn.Sequential(nn.Linear(64, 64)).eval(), torch.randn(32, 64)
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    program = qfuse.optimize(torch.export.export(model, (x,)))

    words = "optimized or compiled by qfuse already(.|\\n)*do: compile the source model"
    with pytest.raises(CaptureError, match=words):
        qfuse.optimize(program)
    with pytest.raises(CaptureError, match=words):
        qfuse.compile(program, options={"backend": "eager"})
