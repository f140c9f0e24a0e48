"""Scales in formats of their own, and of two levels, in every rule that touches parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.cases.mx_linear import SPECS, chosen, dequantized, mx, nv, params
from tests.support.cases.propagate import Graph, applied, only_miss, steps
from tests.support.values import bits_same
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import as_dequantize, as_quantize
from qfuse.ir.quant.element import ScaleFormat
from qfuse.ir.quant.spec import QuantSpec, ZeroPointDomain
from qfuse.ir.stages.verify import verify
from qfuse.optimize.merge.cse import Combine
from qfuse.optimize.propagate.cancel_quantize import CancelQuantize
from qfuse.optimize.propagate.fuse_requantize import FuseRequantize
from qfuse.optimize.propagate.lift_choose import LiftChoose
from qfuse.optimize.propagate.lift_quantize import LiftQuantize
from qfuse.optimize.propagate.sink_dequantize import SinkDequantize
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import RewriteContext
from qfuse.testing.fixed_order import run_fixed_order
from qfuse.testing.run import random_inputs

aten = torch.ops.aten
NONE = ZeroPointDomain.NONE


@pytest.mark.numeric
@pytest.mark.parametrize("spec", SPECS, ids=["mx", "nvfp4"])
def test_dynamic_quantization_rises_above_a_view(spec: QuantSpec) -> None:
    g = Graph(2, 3, 64)
    rows = g.call(aten.view.default, g.x, [6, 64])
    args = chosen(g, rows, spec)
    q = g.call(ops.quantize, rows, *args)
    program = g.done(g.call(ops.dequantize, q, *args))

    fired = applied(program, LiftChoose, LiftQuantize, SinkDequantize).fired
    assert fired["lift-choose"] == (1 if spec.outer is None else 2)
    assert fired["lift-quantize"] == 1
    assert "quantize[2, 3, 64]" in steps(program)
    (quantize,) = [v for n in program.graph.nodes if (v := as_quantize(n)) is not None]
    assert quantize.params.spec.block == (1, 1, spec.block[1])
    assert quantize.params.spec.outer == (None if spec.outer is None else (None,) * 3)


@pytest.mark.numeric
@pytest.mark.parametrize("spec", SPECS, ids=["mx", "nvfp4"])
def test_a_split_of_heads_inside_blocks_is_refused(spec: QuantSpec) -> None:
    g = Graph(6, 64)
    heads = g.call(aten.view.default, g.x, [6, 8, 8])
    three = spec.with_block((1, 1, 5), None if spec.outer is None else (None,) * 3)
    program = g.done(g.call(ops.quantize, heads, *chosen(g, heads, three)))

    miss = only_miss(program, LiftQuantize)
    assert miss.code is MissCode.GRANULARITY


@pytest.mark.numeric
def test_a_second_level_that_does_not_follow_is_named() -> None:
    g = Graph(4, 32)
    turned = g.call(aten.view.default, g.x, [2, 2, 32])
    spec = nv(1, 1, 16, outer=(None, 1, None))
    program = g.done(g.call(ops.quantize, turned, *params(g, spec, 2, 2, 32)))

    miss = only_miss(program, LiftQuantize)
    assert miss.code is MissCode.GRANULARITY
    assert "their second level of scales, in blocks of *x1x*" in miss.reason


@pytest.mark.numeric
@pytest.mark.parametrize(
    "spec", [mx(1, 32), nv(1, 16), nv(1, 16, outer=(1, None)), nv(2, 16, outer=(4, None))]
)
def test_dequantize_sinks_with_both_levels(spec: QuantSpec) -> None:
    g = Graph(8, 64)
    x = dequantized(g, spec, 8, 64, real=g.x)
    program = g.done(g.call(aten.slice.Tensor, x, 0, 4, 8), g.call(aten.slice.Tensor, x, 1, 32, 64))

    assert applied(program, SinkDequantize).fired == {"sink-dequantize": 2}
    real = [v for n in program.graph.nodes if (v := as_dequantize(n)) is not None]
    assert {(v.params.outer_scale is None) for v in real} == {spec.outer is None}


@pytest.mark.numeric
def test_dequantize_sinks_below_a_split() -> None:
    g = Graph(8, 64)
    x = dequantized(g, nv(1, 16, outer=(1, None)), 8, 64, real=g.x)
    parts = g.call(aten.split.Tensor, x, 4, 0)
    program = g.done(*(g.call(aten.neg.default, g.b.item(parts, i)) for i in range(2)))

    assert applied(program, SinkDequantize).fired == {"sink-dequantize": 1}


@pytest.mark.numeric
def test_quantize_rises_above_a_join_each_part_with_its_own() -> None:
    g = Graph(4, 32)
    both = g.call(aten.cat.default, [g.x, g.call(aten.neg.default, g.x)], 0)
    spec = nv(1, 16, outer=(4, None))
    args = params(g, spec, 8, 32)
    program = g.done(g.call(ops.dequantize, g.call(ops.quantize, both, *args), *args))

    assert applied(program, LiftQuantize).fired == {"lift-quantize": 1}
    quantizes = [v for n in program.graph.nodes if (v := as_quantize(n)) is not None]
    outers = {v.params.outer_scale for v in quantizes}
    assert len(outers) == 2
    assert None not in outers


@pytest.mark.numeric
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("op", [aten.cat.default, aten.stack.default])
def test_dequantizes_sink_below_a_join_of_one_second_level(op: Any, axis: int) -> None:
    g = Graph(4, 32)
    spec = nv(1, 16) if axis == 0 else nv(4, 1)
    first, second = params(g, spec, 4, 32), params(g, spec, 4, 32)
    shared = (first, (second[0], None, str(spec), first[3]))
    pair = [g.call(ops.dequantize, g.call(ops.quantize, g.x, *args), *args) for args in shared]
    program = g.done(g.call(op, pair, axis))

    assert applied(program, SinkDequantize).fired == {"sink-dequantize": 1}


@pytest.mark.numeric
def test_second_levels_per_index_are_joined() -> None:
    g = Graph(4, 32)
    spec = nv(1, 16, outer=(1, None))
    program = g.done(
        g.call(aten.cat.default, [dequantized(g, spec, 4, 32, real=g.x) for _ in range(2)], 0)
    )
    assert applied(program, SinkDequantize).fired == {"sink-dequantize": 1}
    (real,) = [v for n in program.graph.nodes if (v := as_dequantize(n)) is not None]
    assert real.params.outer_scale is not None
    assert tuple(real.params.outer_scale.meta["val"].shape) == (8, 1)


def test_different_second_levels_of_whole_parts_are_not_joined() -> None:
    g = Graph(4, 32)
    both = [dequantized(g, nv(1, 16), 4, 32, real=g.x) for _ in range(2)]
    miss = only_miss(g.done(g.call(aten.cat.default, both, 0)), SinkDequantize)
    assert miss.code is MissCode.GRANULARITY
    assert "different second levels of scales" in miss.reason


@pytest.mark.parametrize("other", [mx(1, 16), nv(1, 16).with_block((1, 16), (1, None))])
def test_parts_in_other_formats_are_not_joined(other: QuantSpec) -> None:
    g = Graph(4, 32)
    both = [dequantized(g, spec, 4, 32, real=g.x) for spec in (nv(1, 16), other)]
    miss = only_miss(g.done(g.call(aten.cat.default, both, 0)), SinkDequantize)
    assert miss.code is MissCode.GRANULARITY
    assert "in different ways" in miss.reason


def test_two_levels_do_not_cross_a_padding() -> None:
    g = Graph(4, 32)
    spec = QuantSpec(torch.int8, -8, 7, (None, None), domain=NONE, outer=(None, None))
    scale = g.constant(torch.ones(1, 1), "scale")
    args = (scale, None, str(spec), g.constant(torch.ones(1, 1), "outer"))
    padded = g.call(aten.constant_pad_nd.default, g.x, [0, 1], 0.0)
    below = g.call(
        aten.constant_pad_nd.default,
        g.call(ops.dequantize, g.call(ops.quantize, padded, *args), *args),
        [0, 1],
        0.0,
    )
    program = g.done(below)
    for rule in (LiftQuantize, SinkDequantize):
        miss = only_miss(program, rule)
        assert miss.code is MissCode.GRANULARITY
        assert miss.reason == "its scales have a second level"


@pytest.mark.parametrize("spec", [mx(1, 32), nv(1, 16)])
def test_floats_are_not_padded(spec: QuantSpec) -> None:
    g = Graph(4, 32)
    padded = g.call(aten.constant_pad_nd.default, g.x, [0, 0, 0, 1], 0.0)
    program = g.done(g.call(ops.quantize, padded, *params(g, spec, 5, 32)))
    assert only_miss(program, LiftQuantize).code in {MissCode.DTYPE, MissCode.GRANULARITY}


@pytest.mark.numeric
@pytest.mark.parametrize("spec", SPECS, ids=["mx", "nvfp4"])
def test_quantizing_again_is_one_op_and_never_cancelled(spec: QuantSpec) -> None:
    g = Graph(4, 64)
    args = params(g, spec, 4, 64)
    real = g.call(ops.dequantize, g.call(ops.quantize, g.x, *args), *args)
    program = g.done(g.call(ops.dequantize, g.call(ops.quantize, real, *args), *args))

    miss = only_miss(clone(program), CancelQuantize)
    assert miss.code is MissCode.DTYPE
    assert applied(program, FuseRequantize).fired == {"fuse-requantize": 1}


def test_an_integer_in_mx_is_not_cancelled_either() -> None:
    g = Graph(4, 64)
    spec = QuantSpec(torch.int8, -128, 127, (1, 32), domain=NONE, scale_format=ScaleFormat.E8M0)
    args = params(g, spec, 4, 64)
    real = g.call(ops.dequantize, g.call(ops.quantize, g.x, *args), *args)
    miss = only_miss(g.done(g.call(ops.quantize, real, *args)), CancelQuantize)
    assert miss.code is MissCode.DTYPE
    assert "special format" in miss.reason


def test_quantizes_with_other_second_levels_are_not_one() -> None:
    g = Graph(4, 64)
    one = params(g, nv(1, 16), 4, 64)
    other = (*one[:3], g.constant(torch.full((1, 1), 7.0), "outer"))
    same = (*one[:3], g.constant(_value(g, one[3]).clone(), "outer"))
    real = [
        g.call(ops.dequantize, g.call(ops.quantize, g.x, *args), *args)
        for args in (one, other, same)
    ]
    program = g.done(*(g.call(aten.neg.default, y) for y in real))
    source = clone(program)
    Combine().run(program, RewriteContext("optimize"))

    verify(program)
    quantizes = [n for n in program.graph.nodes if as_quantize(n) is not None]
    assert len(quantizes) == 2
    inputs = random_inputs(program)
    assert bits_same(run_fixed_order(program, inputs), run_fixed_order(source, inputs))


def _value(g: Graph, node: Node) -> torch.Tensor:
    return g.b.module.get_buffer(str(node.target))
