"""What is saved of a compiled model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qfuse.backends import CompiledModule
from qfuse.ir.graph.stage_graph import LoweredGraph, Signature
from qfuse.ir.signature._tree_api import unflatten
from qfuse.report import Report

WEIGHTS, CODE = "weights", "code.pt2"
MODEL, REPORT, PLAN = "model.json", "report.json", "plan.txt"


def code_member(part: int) -> str:
    """Return the name of the package of a part of a chain."""
    return f"code-{part}.pt2"


def kernel_member(number: int) -> str:
    """Return the name of a library of kernels; the first one is the core."""
    return f"kernels-{number}.so"


@dataclass(frozen=True, slots=True)
class SavedModel:
    """The parts of a compiled model.

    Attributes:
        module: The callable.
        lowered: The lowered graph that it was made from.
        report: The report of its compilation.
        plan: The lowered graph as text.
        examples: Example inputs: the tensors of the signature, in its order; ``None`` without.
    """

    module: CompiledModule
    lowered: LoweredGraph
    report: Report
    plan: str
    examples: tuple[torch.Tensor, ...] | None


def call_of(
    signature: Signature, tensors: Sequence[torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with ``tensors`` as its inputs."""
    left = iter(tensors)
    leaves = [next(left) if spec.dtype is not None else spec.constant for spec in signature.inputs]
    args, kwargs = unflatten(leaves, signature.in_spec)
    return tuple(args), dict(kwargs)
