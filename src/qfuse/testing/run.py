"""Run graphs on random inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Interpreter

from qfuse.ir.graph.stage_graph import StageGraph


def random_inputs(program: StageGraph, **sizes: int) -> list[torch.Tensor]:
    """Return one random tensor per input; ``sizes`` has the symbolic sizes by name."""
    tensors: list[torch.Tensor] = []
    for spec in program.signature.inputs:
        assert spec.dtype is not None, f"{spec.name} is not a tensor"
        shape = [s if isinstance(s, int) else sizes[s] for s in spec.shape]
        if spec.dtype.is_floating_point:
            tensors.append(torch.randn(shape, dtype=torch.float32).to(spec.dtype))
        else:
            tensors.append(torch.randint(0, 100, shape).to(spec.dtype))
    return tensors


def run(program: StageGraph, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Run a graph without compiling it; check that the inputs are not changed."""
    before = [t.clone() for t in inputs]
    with torch.no_grad():
        outputs = tuple(Interpreter(program.module).run(*inputs))
    assert all(map(_same_memory, before, inputs)), "a functional graph wrote to its inputs"
    return outputs


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype have the same bytes; a NaN is the same as itself."""
    return torch.equal(*(t.detach().reshape(-1).view(torch.uint8) for t in (a, b)))
