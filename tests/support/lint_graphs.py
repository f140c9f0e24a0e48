"""Small normal graphs for the lint: quantized by hand with chosen numbers, and looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import Node

from qfuse.analysis.placement.finding import LintFinding
from qfuse.analysis.placement.graph import LintGraph
from qfuse.analysis.placement.lint import findings_in
from qfuse.cost import CostModel, CostProfile
from qfuse.ir.aten import aten
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.spec import QuantSpec
from qfuse.pipeline import Pipeline
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder
from qfuse.testing.lowering import NO_OWN_KERNELS
from qfuse.testing.quant import per_channel, per_tensor, per_token

UINT8 = torch.uint8


class LintBuilder(GraphBuilder):
    """Adds quantize and dequantize with given numbers, and quantized products."""

    def params(
        self, spec: QuantSpec, scale: float | torch.Tensor, zero: int | None, shape: Sequence[int]
    ) -> tuple[Node, Node | None, str]:
        """Add scale and zero point; return them with the text of the spec."""
        grid = [int(g) for g in spec.grid(list(shape))]
        count = len(self.graph.nodes)
        values = scale if isinstance(scale, torch.Tensor) else torch.full(grid, scale)
        point = None
        if zero is not None:
            point = self.const(f"zero{count}", torch.full(grid, zero, dtype=torch.int32))
        return self.const(f"scale{count}", values), point, str(spec)

    def stored(
        self,
        x: Node,
        scale: float | torch.Tensor,
        zero: int | None = None,
        spec: QuantSpec | None = None,
    ) -> tuple[Node, tuple[Node, Node | None, str]]:
        """Add a quantize; return it and its parameters. The default is uint8 per tensor."""
        shape = list(x.meta["val"].shape)
        params = self.params(spec or per_tensor(len(shape), UINT8), scale, zero, shape)
        return self.call(ops.quantize, x, *params), params

    def quantized(
        self,
        x: Node,
        scale: float | torch.Tensor,
        zero: int | None = None,
        spec: QuantSpec | None = None,
    ) -> Node:
        """Add a quantize and a dequantize."""
        q, params = self.stored(x, scale, zero, spec)
        return self.call(ops.dequantize, q, *params)

    def dynamic(self, x: Node) -> Node:
        """Add a dynamic quantize per token and a dequantize."""
        rank = len(x.meta["val"].shape)
        spec = per_token(rank)
        choose = ChooseSpec(Formula.AO_SYMMETRIC, torch.int8, -128, 127, spec.block, 1e-6)
        scale = self.item(self.call(ops.choose_qparams, x, str(choose)), 0)
        q = self.call(ops.quantize, x, scale, None, str(spec))
        return self.call(ops.dequantize, q, scale, None, str(spec))

    def weight(self, *shape: int, spec: QuantSpec | None = None, most: int = 127) -> Node:
        """Add a dequantized int8 weight whose values span 2 * most + 1 levels."""
        spec = spec or per_channel(len(shape))
        q = torch.randint(-most, most + 1, shape).to(torch.int8)
        # In every block, whatever was drawn.
        q.reshape(-1)[::2] = most
        q.reshape(-1)[1::2] = -most
        name = f"w{len(self.graph.nodes)}"
        scale = torch.rand([int(g) for g in spec.grid(shape)]) * 1e-3 + 1e-3
        params = (self.const(f"{name}_scale", scale), None, str(spec))
        return self.call(ops.dequantize, self.const(name, q), *params)

    def linear(self, x: Node, n: int, weight: Node | None = None) -> Node:
        """Add a linear with a quantized weight."""
        k = int(x.meta["val"].shape[-1])
        return self.call(aten.linear.default, x, weight or self.weight(n, k))


def look(
    build: Callable[[LintBuilder], Node | tuple[Node, ...]],
    *inputs: torch.Tensor,
    target: Target | None = None,
) -> list[LintFinding]:
    """Build a graph with one input per tensor, ``x0``, ``x1``, ..., and return the findings."""
    b = LintBuilder()
    outs = build(b)
    program: NormalGraph = b.done(*(outs if isinstance(outs, tuple) else (outs,)))
    cost = CostModel(CostProfile.pinned())
    pipeline = Pipeline(target or Target.for_testing(), cost, NO_OWN_KERNELS)
    with torch.no_grad():
        return findings_in(LintGraph.of_normal(program, list(inputs), pipeline))


def codes(findings: Sequence[LintFinding]) -> list[str]:
    """Return the codes of the findings but for those about time, which depend on the sizes."""
    return sorted(f.code for f in findings if f.code not in {"small-layer", "dynamic-quantization"})
