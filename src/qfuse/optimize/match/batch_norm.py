"""Batch norms as a factor and a summand per channel."""

from __future__ import annotations

import torch

from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.views import result_of
from qfuse.rewrite.prelude import Miss, MissCode, Node, OpOverload, arguments, aten

BATCH_NORMS: tuple[OpOverload, ...] = (
    aten.batch_norm.default,
    aten._native_batch_norm_legit_no_training.default,
)
"""The ops of inference."""

CHANNELS = 1
"""The axis that a batch norm has its statistics for."""


def refuse_training(node: Node) -> Miss | None:
    """Refuse a norm that computes the statistics of its input."""
    if arguments(node).get("training", False) is False:
        return None
    return Miss(MissCode.ARGUMENT, node, "it computes statistics of its input", progress=2)


def normalized(node: Node) -> Node | Miss:
    """Return the normalized result, if it is the only one that is used."""
    if is_call(node, aten.batch_norm.default):
        return node
    users = list(node.users)
    parts = [result_of(user) for user in users]
    if len(parts) != 1 or parts[0] is None or parts[0][1] != 0:
        return Miss(MissCode.SHARED, node, "its statistics are used too", progress=2)
    return users[0]


def factor_and_shift(n: int, node: Node) -> tuple[torch.Tensor, torch.Tensor] | Miss:
    """Return what the norm multiplies by, and what it adds then; float64, ``[n]``.

    Refuses: statistics or parameters that are computed at run time; factors that are not finite.
    """
    a = arguments(node)
    ones, eps = torch.ones(n, dtype=torch.float64), a["eps"]
    gamma = ones if a["weight"] is None else constant_value(a["weight"])
    beta = torch.zeros_like(ones) if a["bias"] is None else constant_value(a["bias"])
    mean, var = (constant_value(a[name]) for name in ("running_mean", "running_var"))
    if gamma is None or beta is None or mean is None or var is None:
        text = "its statistics or parameters are computed at run time"
        return Miss(MissCode.NOT_CONSTANT, node, text, progress=2)
    assert isinstance(eps, (int, float)), "eps is a number in the schema"
    # In float64, as the factor is rounded only once it is part of a scale or of an operand.
    factor = gamma.double() / (var.double() + eps).sqrt()
    shift = beta.double() - mean.double() * factor
    # A variance of 0 with eps 0.
    if not bool((factor + shift).isfinite().all()):
        return Miss(MissCode.RANGE, node, "its factors are not finite", progress=2)
    return factor, shift
