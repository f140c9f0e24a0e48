"""What the tests of the spellings in plain ATen share, besides the helpers of ``qfuse.testing``."""

from __future__ import annotations

import torch
from torch.fx import Node

from qfuse.ir.graph.stage_graph import CapturedGraph, StageGraph
from qfuse.testing.build import GraphBuilder
from qfuse.testing.rules import assert_same_values, golden, refusal, truth

__all__ = [
    "assert_same_values",
    "aten",
    "calls",
    "codes",
    "finish",
    "golden",
    "refusal",
    "scales",
    "truth",
    "whole",
]

aten = torch.ops.aten


def finish(b: GraphBuilder, *outs: Node) -> CapturedGraph:
    """Finish a source graph."""
    return b.done(*outs, stage=CapturedGraph)


def calls(program: StageGraph) -> list[str]:
    """Return the names of the ops that are called, in order."""
    return [
        str(n.target).removesuffix(".default") for n in program.graph.nodes if n.op[:4] == "call"
    ]


def whole(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return small whole numbers, whose products have exact sums in every order."""
    return torch.randint(-4, 5, shape).to(dtype)


def codes(*shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    """Return random quantized values of the whole range."""
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max + 1, shape).to(dtype)


def scales(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random scales, none of them a power of two."""
    return (torch.rand(shape) * 0.02 + 3e-3).to(dtype)
