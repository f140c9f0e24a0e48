"""Batch norms that no product took: two steps per element."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qfuse.ir.graph.schema import arguments, is_call
from qfuse.ir.ops.batch_norm import (
    BATCH_NORMS,
    CHANNELS,
    computes_statistics,
    constant_factors,
    only_result,
)
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.sizes import same_strides
from qfuse.rewrite.prelude import Exactness, Node, Rewriter, aten
from qfuse.rewrite.session import RewriteSession


def expand_batch_norms(session: RewriteSession) -> None:
    """Replace float32 norms with constant statistics by ``x * factor + shift``.

    That is what torch's kernel computes. Inductor instead inlines the definition with its root and
    its reciprocal, which take longer than everything else in a loop over 8-bit values.
    """
    for node in list(session.program.graph.nodes):
        found = _site(node) if is_call(node, *BATCH_NORMS) else None
        if found is not None:
            session.rewrite("expand-batch-norm", node, found, proof=Exactness.ROUNDING)


@dataclass(frozen=True, slots=True)
class _Expansion:
    """Replaces one norm; ``factor`` and ``shift`` are float32 and broadcast to ``x``."""

    x: Node
    result: Node
    factor: torch.Tensor
    shift: torch.Tensor

    def __call__(self, rw: Rewriter) -> None:
        factor = rw.constant(self.factor, f"{self.result.name}_factor")
        shift = rw.constant(self.shift, f"{self.result.name}_shift")
        scaled = rw.call(aten.mul.Tensor, self.x, factor)
        rw.replace(self.result, rw.call(aten.add.Tensor, scaled, shift))


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
    factors = constant_factors(n, node)
    if factors is None or not same_strides(x.meta["val"], result.meta["val"]):
        return None
    spread = (n, *(1,) * (len(shape) - CHANNELS - 1))
    factor, shift = (part.float().reshape(spread) for part in factors)
    if not bool((factor.isfinite() & shift.isfinite()).all()):
        return None
    return _Expansion(x, result, factor, shift)
