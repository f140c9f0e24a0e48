"""Attention over keys and values that several heads share, and the graph without the rule."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.stages.verify import verify
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import PassResult
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Rule
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default


class Heads:
    """Queries, keys and values, ready to be repeated.

    Args:
        heads: Heads of keys and values.
        group: Heads of queries for each of them.
        rows: Tokens that ask.
        positions: Tokens that are asked about.
        batch: Independent ones, or the name of a varying size.
        dtype: Of everything.
        width: Of a head of queries and keys, and of one of values.
    """

    def __init__(  # noqa: PLR0913 - the sizes of three tensors
        self,
        heads: int = 2,
        group: int = 3,
        *,
        rows: int | str = 1,
        positions: int | str = 5,
        batch: int | str = 2,
        dtype: torch.dtype = torch.float32,
        width: tuple[int, int] = (8, 8),
    ) -> None:
        self.b = GraphBuilder()
        self.heads, self.group, self.positions, self.batch = heads, group, positions, batch
        self.width = width
        self.q = self.b.arg("q", dtype, batch, heads * group, rows, width[0])
        self.k = self.b.arg("k", dtype, batch, heads, positions, width[0])
        self.v = self.b.arg("v", dtype, batch, heads, positions, width[1])

    def repeated(
        self, node: Node, group: int | None = None, *, view: Any = aten.view.default
    ) -> Node:
        """Spell the repetition of heads as models do; sizes must not vary."""
        group = self.group if group is None else group
        b, h, s, d = node.meta["val"].shape
        single = self.b.call(aten.unsqueeze.default, node, 2)
        spread = self.b.call(aten.expand.default, single, [b, h, group, s, d])
        copy = self.b.call(aten.clone.default, spread, memory_format=torch.contiguous_format)
        return self.b.call(view, copy, [b, h * group, s, d])

    def attention(self, *operands: Node, **options: Any) -> Node:
        """Add the attention."""
        mask = options.pop("attn_mask", None)
        causal = options.pop("is_causal", False)
        return self.b.call(ATTENTION, *operands, mask, 0.0, causal, **options)

    def done(self, *outs: Node) -> NormalGraph:
        """Finish the graph; a reader stands between every value and the caller."""
        return self.b.done(*(self.b.call(aten.neg.default, out) for out in outs))


def matching(program: NormalGraph, *rules: type[Rule[Any]]) -> PassResult:
    """Apply rules, and verify."""
    result = apply_rules(program, [rule() for rule in rules])
    verify(program)
    return result


def matches_double(program: NormalGraph, *rules: type[Rule[Any]], **sizes: int) -> PassResult:
    """Apply rules; the outcome is as near to float64 as before, shapes and dtypes stay."""
    source = clone(program)
    result = matching(program, *rules)
    inputs = random_inputs(program, **sizes)
    exact = run(source, [x.double() if x.is_floating_point() else x for x in inputs])
    for old, new, truth in zip(run(source, inputs), run(program, inputs), exact, strict=True):
        assert (old.dtype, old.shape) == (new.dtype, new.shape)
        noise = (old.double() - truth).abs().max() if old.numel() else torch.tensor(0.0)
        step = torch.finfo(old.dtype).eps * truth.abs().max() if old.numel() else 0.0
        assert not old.numel() or (new.double() - truth).abs().max() <= 2 * noise + 4 * step
    return result
