"""Activations, gates and quantizes, for the tests of what fuses them."""

from __future__ import annotations

from typing import Any

import torch
from tests.support.cases import mx_linear as micro_cases
from tests.support.cases.propagate import Graph, spec_of
from tests.support.sources.dialects import difference, equal_but_for_nan, results, strides
from torch.fx import Node

from qfuse.ir.graph.stage_graph import NormalGraph, OptimizedGraph, StageGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.activation import as_activation
from qfuse.ir.ops.views import shape_of
from qfuse.ir.quant.choose import ChooseSpec, Formula, fixed_zero_point
from qfuse.ir.quant.spec import Block
from qfuse.ir.stages.verify import verify
from qfuse.optimize.fuse.activation import FuseActivationQuantize
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import PassResult
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Miss
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten

ACTS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "act(relu)": (aten.relu.default, (), {}),
    "act(gelu)": (aten.gelu.default, (), {}),
    "act(gelu_tanh)": (aten.gelu.default, (), {"approximate": "tanh"}),
    "act(silu)": (aten.silu.default, (), {}),
    "act(sigmoid)": (aten.sigmoid.default, (), {}),
    "act(tanh)": (aten.tanh.default, (), {}),
    "act(hardswish)": (aten.hardswish.default, (), {}),
    "act(hardsigmoid)": (aten.hardsigmoid.default, (), {}),
    "act(hardtanh,-0.5,0.75)": (aten.hardtanh.default, (-0.5, 0.75), {}),
    "act(hardtanh,0.0,6.0)": (aten.relu6.default, (), {}),
    "act(hardtanh,-1.0,2.0)": (aten.clamp.default, (-1, 2), {}),
    "act(squared_relu)": (aten.square.default, (), {}),
    "act(leaky_relu,0.2)": (aten.leaky_relu.default, (0.2,), {}),
}


def activated(g: Graph, x: Node, name: str = "act(silu)") -> Node:
    """An activation of ``x``."""
    op, args, kwargs = ACTS[name]
    x = g.call(aten.relu.default, x) if op is aten.square.default else x
    return g.call(op, x, *args, **kwargs)


def cast(g: Graph, x: Node, dtype: torch.dtype) -> Node:
    """A cast."""
    return g.call(aten._to_copy.default, x, dtype=dtype)


def times(g: Graph, a: Node, b: Node) -> Node:
    """A product."""
    return g.call(aten.mul.Tensor, a, b)


def stored(
    g: Graph, y: Node, how: str = "static", block: Block | None = None, **changes: Any
) -> Node:
    """Quantize ``y`` and dequantize it again for a reader."""
    rank = len(shape_of(y))
    blocks: dict[str, Block] = {
        "static": (None,) * rank,
        "dynamic": (None,) * rank,
        "token": (*[1] * (rank - 1), None),
        "symmetric": (*[1] * (rank - 1), None),
        "group": (*[1] * (rank - 1), 4),
        "channel": (*[None] * (rank - 1), 1),
    }
    spec = spec_of(*(block or blocks[how]), float_dtype=y.meta["val"].dtype, **changes)
    if how in {"static", "channel"}:
        params: tuple[Node, Node | None] = g.params(y, spec)
    else:
        formula = Formula.AO_SYMMETRIC if how == "symmetric" else Formula.AO_ASYMMETRIC
        low, high = spec.quant_min, spec.quant_max
        choose = ChooseSpec(formula, spec.dtype, low, high, spec.block, 1e-7)
        pair = g.call(ops.choose_qparams, y, str(choose))
        zero = None if fixed_zero_point(choose) == 0 else g.b.item(pair, 1)
        params = g.b.item(pair, 0), zero
    return g.dequantize(g.quantize(y, spec, params), spec, params)


def two_levels(g: Graph, y: Node) -> Node:
    """Quantize ``y`` with constant scales of two levels, and dequantize it again."""
    shape = [int(size) for size in shape_of(y)]
    return micro_cases.dequantized(g, micro_cases.nv(1, 16), *shape, real=y)


def fused(program: NormalGraph, **sizes: int) -> PassResult:
    """Fuse; bits, types and strides of all outputs must stay."""
    source = clone(program)
    result = apply_rules(program, [FuseActivationQuantize()])
    verify(OptimizedGraph(program.module, program.signature, program.log))
    inputs = random_inputs(program, **sizes)
    for old, new, node in zip(
        run(source, inputs), run(program, inputs), results(program), strict=True
    ):
        assert (old.dtype, old.shape) == (new.dtype, new.shape)
        assert equal_but_for_nan(old, new), f"{to_text(program.graph)}\n{difference(old, new)}"
        assert strides(old) == strides(new), f"strides of {node}\n{to_text(program.graph)}"
    return result


def refused(program: NormalGraph, **sizes: int) -> Miss:
    """Refuse once and change nothing; return the refusal."""
    before = to_text(program.graph)
    result = fused(program, **sizes)
    assert not result.modified
    assert to_text(program.graph) == before
    (miss,) = [m for _, m in result.misses]
    return miss


def epilogues(program: StageGraph) -> list[str]:
    """The steps of every fused activation."""
    views = map(as_activation, program.graph.nodes)
    return [str(view.epilogue) for view in views if view is not None]
