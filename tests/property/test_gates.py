"""Random activations, gates and roundings fuse with their quantize without changing a bit."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.sources.dialects import difference, equal_but_for_nan, strides
from tests.support.strategies.quant_specs import SEEDS
from tests.support.strategies.rowwise import Case
from torch._ops import OpOverload
from torch.fx import Node

from qfuse.ir.graph.stage_graph import OptimizedGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.choose import ChooseSpec, Formula, fixed_zero_point
from qfuse.ir.quant.element import CONTAINER, Element, ScaleFormat
from qfuse.ir.quant.spec import Arithmetic, Block, QuantSpec, ZeroPointDomain
from qfuse.ir.stages.verify import verify
from qfuse.optimize.fuse.activation import FuseActivationQuantize
from qfuse.rewrite.clone import clone
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import random_inputs, run

pytestmark = [pytest.mark.property, pytest.mark.numeric]

aten = torch.ops.aten

_ROWS: list[int | str] = ["m", 1, 4]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
ACTS = [
    *((op, ()) for op in (aten.relu.default, aten.silu.default, aten.gelu.default)),
    *((op, ()) for op in (aten.sigmoid.default, aten.tanh.default, aten.hardswish.default)),
    (aten.leaky_relu.default, (0.3,)),
    (aten.hardtanh.default, (-0.5, 0.5)),
    (aten.clamp.default, (0, None)),
    (aten.clamp.default, (None, 1.0)),
    (aten.neg.default, ()),
]


class RewriteBudget:
    """Grows one activation, gate and quantize."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.b = GraphBuilder()
        self.count = 0
        self.values: list[Node] = []

    def chance(self, often: int) -> bool:
        """Once in so many."""
        return self.draw(st.integers(0, often - 1)) == 0

    def keep(self, node: Node) -> Node:
        """Let something else read a value, perhaps."""
        self.values.append(node)
        return node

    def factors(self) -> tuple[Node, Node]:
        """Two tensors: inputs of their own, one twice, parts of one, or turned."""
        draw, dtype = self.draw, self.draw(st.sampled_from(FLOATS))
        rows = draw(st.sampled_from(_ROWS))
        width = draw(st.sampled_from([4, 1, 3, 6]))
        shape: list[int | str] = [rows, *draw(st.sampled_from([[], [2]])), width]
        kind = draw(st.sampled_from(["parts", "two", "slices", "one", "turned", "types", "thirds"]))
        if kind in {"parts", "slices", "thirds"}:
            count = 3 if kind == "thirds" else 2
            whole = self.b.arg("x", dtype, *shape[:-1], count * width)
            if kind == "slices":
                cuts = [(0, width), (width, 2 * width)]
                parts = [self.b.call(aten.slice.Tensor, whole, -1, *cut) for cut in cuts]
            else:
                split = self.b.call(aten.split.Tensor, whole, width, -1)
                parts = [self.b.item(split, index) for index in range(2)]
            if kind == "parts" and self.chance(3):
                self.keep(parts[0])
            first = draw(st.integers(0, 1))
            return parts[first], parts[1 - first]
        x = self.b.arg("x", dtype, *shape)
        if kind == "one":
            return x, x
        other = draw(st.sampled_from(FLOATS)) if kind == "types" else dtype
        if kind == "turned" and rows != "m":
            y = self.b.arg("y", other, *shape[::-1])
            return x, self.b.call(aten.permute.default, y, list(range(len(shape)))[::-1])
        return x, self.b.arg("y", other, *shape)

    def rounded(self, x: Node) -> Node:
        """Cast, or go to quantized values and back, or neither."""
        kind = self.draw(st.integers(0, 5))
        if kind == 0:
            return self.keep(
                self.b.call(aten._to_copy.default, x, dtype=self.draw(st.sampled_from(FLOATS)))
            )
        if kind == 1:
            return self.stored(x)
        return self.micro(x) if kind == 2 else x

    def stored(self, x: Node) -> Node:
        """Quantize and dequantize."""
        draw, rank = self.draw, len(shape_of(x))
        blocks = [(None,) * rank, (*[1] * (rank - 1), None), (*[1] * (rank - 1), 2)]
        block = draw(st.sampled_from(blocks))
        dtype, low, high = draw(
            st.sampled_from([(torch.int8, -128, 127), (torch.uint8, 0, 255), (torch.uint8, 0, 15)])
        )
        spec = QuantSpec(dtype, low, high, block, dtype_of(x))
        scale: Node
        zero: Node | None
        if draw(st.booleans()) and all(b is None for b in block):
            self.count += 1
            grid = [1] * rank
            scale = self.b.const(f"scale{self.count}", torch.full(grid, 0.03 * self.count))
            zero = None
            if draw(st.booleans()):
                zero = self.b.const(f"zero{self.count}", torch.full(grid, 7, dtype=torch.int32))
        else:
            formula = draw(st.sampled_from([Formula.AO_ASYMMETRIC, Formula.AO_SYMMETRIC]))
            choose = ChooseSpec(formula, dtype, low, high, block, 1e-7)
            pair = self.b.call(ops.choose_qparams, x, str(choose))
            scale = self.b.item(pair, 0)
            fixed = fixed_zero_point(choose)
            zero = None if fixed == 0 else self.b.item(pair, 1)
        q = self.b.call(ops.quantize, x, scale, zero, str(spec))
        return self.keep(self.b.call(ops.dequantize, q, scale, zero, str(spec)))

    def micro(self, x: Node) -> Node:
        """Quantize and dequantize with scales in a format of their own, of one level or two."""
        self.count += 1
        whole: Block = (None,) * len(shape_of(x))
        grid, levels = [1] * len(whole), self.draw(st.integers(1, 2))
        spec = QuantSpec(
            *(CONTAINER, -6, 6, whole, dtype_of(x), Arithmetic(), ZeroPointDomain.NONE),
            *(Element.E2M1, ScaleFormat.E4M3, whole if levels > 1 else None),
        )
        scale = torch.full(grid, 0.25 * self.count).to(torch.float8_e4m3fn)
        args: list[Node | str | None] = [self.b.const(f"scale{self.count}", scale), None, str(spec)]
        if levels > 1:
            args.append(self.b.const(f"outer{self.count}", torch.full(grid, 0.3)))
        q = self.b.call(ops.quantize, x, *args)
        return self.keep(self.b.call(ops.dequantize, q, *args))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """An activation, perhaps times something, that is quantized; some of it is read elsewhere."""
    g = RewriteBudget(draw)
    x, up = g.factors()
    op, args = draw(st.sampled_from(ACTS))
    y = g.keep(g.b.call(op, g.rounded(x), *args))
    if draw(st.booleans()):
        sides = [g.rounded(y), g.rounded(up)]
        y = g.keep(g.b.call(aten.mul.Tensor, *draw(st.permutations(sides))))
    outs = [g.b.call(aten.neg.default, g.stored(g.rounded(y)))]
    read = [value for value in g.values if g.chance(8)]
    outs += [value if g.chance(2) else g.b.call(aten.neg.default, value) for value in read]
    return Case(
        g.b.done(*draw(st.permutations(outs))), draw(st.sampled_from([3, 1, 0, 5])), draw(SEEDS)
    )


def check_fuse(case: Case) -> Counter[str]:
    """Fuse; bits and strides stay, or nothing happens."""
    torch.manual_seed(case.seed)
    program, source = case.program, clone(case.program)
    result = apply_rules(program, [FuseActivationQuantize()])
    verify(OptimizedGraph(program.module, program.signature, program.log))
    inputs = random_inputs(program, m=case.rows)
    for old, new in zip(run(source, inputs), run(program, inputs), strict=True):
        assert (old.dtype, old.shape, strides(old)) == (new.dtype, new.shape, strides(new))
        assert equal_but_for_nan(old, new), f"{to_text(program.graph)}\n{difference(old, new)}"
    assert not apply_rules(program, [FuseActivationQuantize()]).modified
    return result.fired


@given(cases())
def test_bits_and_strides_stay(case: Case) -> None:
    check_fuse(case)


@pytest.mark.parametrize("op", [aten.gelu.default, aten.silu.default, aten.sigmoid.default])
@pytest.mark.parametrize("width", [1, 3, 6])
def test_a_dense_copy_is_not_looked_through(op: OpOverload, width: int) -> None:
    # A library computes a function of a slice by another formula than that of a dense tensor.
    b = GraphBuilder()
    whole = b.arg("x", torch.float32, 3, 2, 2 * width)
    part = b.call(aten.slice.Tensor, whole, -1, 0, width)
    y = b.call(op, b.call(aten._to_copy.default, part, dtype=torch.float32))
    block: Block = (None, None, None)
    choose = ChooseSpec(Formula.AO_SYMMETRIC, torch.int8, -128, 127, block, 1e-7)
    pair = b.call(ops.choose_qparams, y, str(choose))
    params = (b.item(pair, 0), b.item(pair, 1), str(QuantSpec(torch.int8, -128, 127, block)))
    q = b.call(ops.quantize, y, *params)
    program = b.done(b.call(aten.neg.default, b.call(ops.dequantize, q, *params)), params[0])

    assert check_fuse(Case(program, 3, seed=width)) == {"fuse-activation-quantize": 1}
