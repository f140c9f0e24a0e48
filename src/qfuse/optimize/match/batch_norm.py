"""Batch norms as a factor and a summand per channel."""

from __future__ import annotations

import torch

from qfuse.ir.ops.batch_norm import computes_statistics, constant_norm, only_result
from qfuse.rewrite.prelude import Miss, MissCode, Node


def refuse_training(node: Node) -> Miss | None:
    """Refuse a norm that computes the statistics of its input."""
    if not computes_statistics(node):
        return None
    return Miss(MissCode.ARGUMENT, node, "it computes statistics of its input", progress=2)


def normalized(node: Node) -> Node | Miss:
    """Return the normalized result, if it is the only one that is used."""
    result = only_result(node)
    if result is None:
        return Miss(MissCode.SHARED, node, "its statistics are used too", progress=2)
    return result


def factor_and_shift(n: int, node: Node) -> tuple[torch.Tensor, torch.Tensor] | Miss:
    """Return what the norm multiplies by, and what it adds then; float64, ``[n]``.

    Refuses: statistics or parameters that are computed at run time; factors that are not finite.
    """
    norm = constant_norm(n, node)
    if norm is None:
        text = "its statistics or parameters are computed at run time"
        return Miss(MissCode.NOT_CONSTANT, node, text, progress=2)
    factor, shift = norm.factor, norm.shift
    if not bool((factor + shift).isfinite().all()):
        return Miss(MissCode.RANGE, node, "its factors are not finite", progress=2)
    return factor, shift
