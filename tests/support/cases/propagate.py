"""Small graphs for the rules that move quantization, and what they must not change."""

from __future__ import annotations

from typing import Any

import torch
from tests.support.sources.dialects import difference, equal_but_for_nan, results, strides
from torch.fx import Node

from qfuse.cost import CostModel, CostProfile
from qfuse.ir.graph.stage_graph import NormalGraph, StageGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.views import shape_of
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.spec import Block, QuantSpec
from qfuse.ir.stages.verify import verify
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import PassResult, RewriteContext
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Miss, Rule
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten


def spec_of(*block: int | None, dtype: torch.dtype = torch.int8, **changes: Any) -> QuantSpec:
    """A spec with a block and the whole range of an integer type."""
    info = torch.iinfo(dtype)
    low, high = changes.pop("low", info.min), changes.pop("high", info.max)
    return QuantSpec(dtype, low, high, block, **changes)


def priced() -> RewriteContext:
    """Prices of the pinned machine."""
    return RewriteContext("optimize", CostModel(CostProfile.pinned()))


class Graph:
    """A builder that makes parameters along."""

    def __init__(self, *shape: int | str, dtype: torch.dtype = torch.float32) -> None:
        self.b = GraphBuilder()
        self.x = self.b.arg("x", dtype, *shape)
        self._count = 0

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        """Add a call."""
        return self.b.call(op, *args, **kwargs)

    def constant(self, value: torch.Tensor, name: str) -> Node:
        """Add a constant."""
        self._count += 1
        return self.b.const(f"{name}{self._count}", value)

    def params(self, x: Node, spec: QuantSpec, scale: float | None = None) -> tuple[Node, Node]:
        """Add a scale and a zero point; one scale for all if it is given."""
        grid = [int(size) for size in spec.grid(shape_of(x))]
        value = torch.rand(grid) * 0.05 + 1e-2 if scale is None else torch.full(grid, scale)
        zero = torch.randint(spec.quant_min // 4, spec.quant_max // 4 + 1, grid, dtype=torch.int32)
        return self.constant(value, "scale"), self.constant(zero, "zero")

    def quantize(self, x: Node, spec: QuantSpec, params: tuple[Node, Node | None]) -> Node:
        """Add a quantize."""
        return self.call(ops.quantize, x, *params, str(spec))

    def dequantize(self, q: Node, spec: QuantSpec, params: tuple[Node, Node | None]) -> Node:
        """Add a dequantize."""
        return self.call(ops.dequantize, q, *params, str(spec))

    def choose(self, x: Node, block: Block) -> tuple[Node, Node]:
        """Add a dynamic choice of parameters."""
        spec = ChooseSpec(Formula.AO_ASYMMETRIC, torch.int8, -128, 127, block, 1e-7)
        pair = self.call(ops.choose_qparams, x, str(spec))
        return self.b.item(pair, 0), self.b.item(pair, 1)

    def stored(self, *shape: int) -> Node:
        """Add an input of quantized values."""
        self._count += 1
        return self.b.arg(f"q{self._count}", torch.int8, *shape)

    def done(self, *outs: Node) -> NormalGraph:
        """Finish the graph; a reader stands between every value and the caller."""
        return self.b.done(*(self._read(out) for out in outs))

    def _read(self, node: Node) -> Node:
        if node.meta["val"].is_floating_point() and node.meta["val"].itemsize > 1:
            return self.call(aten.neg.default, node)
        if node.target is ops.quantize:
            real = self.call(ops.dequantize, node, *node.args[1:])
            return self.call(aten.neg.default, real)
        return self.call(aten._to_copy.default, node, dtype=torch.float32)


def applied(
    program: StageGraph,
    *rules: type[Rule[Any]],
    context: RewriteContext | None = None,
    **sizes: int,
) -> PassResult:
    """Apply rules; bits, types and strides of all outputs must stay."""
    source = clone(program)
    result = apply_rules(program, [rule() for rule in rules], context)
    verify(program)
    inputs = random_inputs(program, **sizes)
    for old, new, node in zip(
        run(source, inputs), run(program, inputs), results(program), strict=True
    ):
        same = old.dtype == new.dtype and old.shape == new.shape and equal_but_for_nan(old, new)
        assert same, f"{to_text(program.graph)}\n{difference(old, new)}"
        assert strides(old) == strides(new), f"strides of {node}\n{to_text(program.graph)}"
    return result


def only_miss(
    program: StageGraph, rule: type[Rule[Any]], context: RewriteContext | None = None, **sizes: int
) -> Miss:
    """Apply a rule that must refuse once and change nothing; return the refusal."""
    before = to_text(program.graph)
    result = applied(program, rule, context=context, **sizes)
    assert not result.modified
    assert to_text(program.graph) == before
    (miss,) = [m for _, m in result.misses]
    return miss


def steps(program: NormalGraph) -> list[str]:
    """The calls, each with its shape: ``view[2, 4]``."""
    told = []
    for node in program.graph.nodes:
        if node.op == "call_function" and isinstance(node.meta["val"], torch.Tensor):
            name = getattr(node.target, "__name__", str(node.target)).removesuffix(".default")
            name = name.removesuffix(".Tensor").removesuffix(".int")
            told.append(
                f"{name}{[str(s) if not isinstance(s, int) else s for s in shape_of(node)]}"
            )
    return told
