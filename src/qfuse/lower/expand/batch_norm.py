"""Batch norms that no product took: three steps per element."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qfuse.ir.graph.schema import arguments, is_call
from qfuse.ir.memory_formats import CHANNELS
from qfuse.ir.ops.batch_norm import (
    BATCH_NORMS,
    computes_statistics,
    constant_norm,
    only_result,
)
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.sizes import same_strides
from qfuse.rewrite.prelude import Exactness, Node, Rewriter, aten
from qfuse.rewrite.session import RewriteSession


def expand_batch_norms(session: RewriteSession) -> None:
    """Replace float32 norms with constant statistics by ``(x - mean) * factor + bias``.

    Inductor inlines the definition with its root and its reciprocal, which take longer than
    everything else in a loop over 8-bit values. The mean stays apart from the bias: their sum would
    cancel in a channel whose mean is large beside its deviation.
    """
    for node in list(session.program.graph.nodes):
        found = _site(node) if is_call(node, *BATCH_NORMS) else None
        if found is not None:
            session.rewrite("expand-batch-norm", node, found, proof=Exactness.ROUNDING)


@dataclass(frozen=True, slots=True)
class _Expansion:
    """Replaces one norm; the constants are float32 and broadcast to ``x``."""

    x: Node
    result: Node
    mean: torch.Tensor
    factor: torch.Tensor
    bias: torch.Tensor

    def __call__(self, rw: Rewriter) -> None:
        y = self.x
        for op, value, name in (
            (aten.sub.Tensor, self.mean, "mean"),
            (aten.mul.Tensor, self.factor, "factor"),
            (aten.add.Tensor, self.bias, "bias"),
        ):
            y = rw.call(op, y, rw.constant(value, f"{self.result.name}_{name}"))
        rw.replace(self.result, y)


def _site(node: Node) -> _Expansion | None:
    x, result = arguments(node)["input"], only_result(node)
    assert isinstance(x, Node), "a norm has an input"
    if result is None or computes_statistics(node):
        return None
    shape = shape_of(x)
    n = shape[CHANNELS]
    # A result of float32 for other inputs does not exist, but parameters may be wider.
    if not isinstance(n, int) or {dtype_of(x), dtype_of(result)} != {torch.float32}:
        return None
    norm = constant_norm(n, node)
    if norm is None or not same_strides(x.meta["val"], result.meta["val"]):
        return None
    spread = (n, *(1,) * (len(shape) - CHANNELS - 1))
    parts = [p.float().reshape(spread) for p in (norm.mean, norm.factor, norm.bias)]
    if not all(bool(part.isfinite().all()) for part in parts):
        return None
    return _Expansion(x, result, *parts)
