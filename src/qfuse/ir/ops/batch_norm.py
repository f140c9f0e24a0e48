"""Batch norms of inference, and their arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch.fx import Node

from qfuse.ir.aten import aten
from qfuse.ir.graph.schema import arguments, is_call
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.views import result_of

BATCH_NORMS: tuple[OpOverload, ...] = (
    aten.batch_norm.default,
    aten._native_batch_norm_legit_no_training.default,
)
"""The ops of inference."""


def computes_statistics(node: Node) -> bool:
    """Whether a norm computes the statistics of its input."""
    return arguments(node).get("training", False) is not False


def only_result(node: Node) -> Node | None:
    """Return the normalized values, or ``None`` if statistics that the norm returns are used."""
    if is_call(node, aten.batch_norm.default):
        return node
    users = list(node.users)
    parts = [result_of(user) for user in users]
    return users[0] if len(parts) == 1 and parts[0] is not None and parts[0][1] == 0 else None


@dataclass(frozen=True, slots=True)
class ConstantNorm:
    """What a norm of constants computes: ``(x - mean) * factor + bias``; float64, ``[n]`` each."""

    mean: torch.Tensor
    factor: torch.Tensor
    bias: torch.Tensor

    @property
    def shift(self) -> torch.Tensor:
        """What is added to ``x * factor``."""
        return self.bias - self.mean * self.factor


def constant_norm(n: int, node: Node) -> ConstantNorm | None:
    """Return the constants of a norm of ``n`` channels.

    ``None`` if its statistics or parameters are computed at run time. A variance of 0 with eps 0
    gives factors that are not finite.
    """
    a = arguments(node)
    ones, eps = torch.ones(n, dtype=torch.float64), a["eps"]
    gamma = ones if a["weight"] is None else constant_value(a["weight"])
    beta = torch.zeros_like(ones) if a["bias"] is None else constant_value(a["bias"])
    mean, var = (constant_value(a[name]) for name in ("running_mean", "running_var"))
    if gamma is None or beta is None or mean is None or var is None:
        return None
    assert isinstance(eps, (int, float)), "eps is a number in the schema"
    # In float64, as the factor is rounded only once it is part of a scale or of an operand.
    factor = gamma.double() / (var.double() + eps).sqrt()
    return ConstantNorm(mean.double(), factor, beta.double())
