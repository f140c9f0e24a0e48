"""Random spellings of norms: they fuse with their quantize without changing a bit, or not at all."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.cases.norm import Spelling, Writer, assert_lowered_alike
from tests.support.sources.dialects import difference, equal_but_for_nan, results, strides
from tests.support.strategies.quant_specs import SEEDS
from torch.fx import Node

from qfuse.ir.dtypes import widens
from qfuse.ir.graph.stage_graph import NormalGraph, OptimizedGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops.norms import as_fused_norm
from qfuse.ir.quant.choose import Formula
from qfuse.ir.stages.verify import verify
from qfuse.optimize.fuse.norm import FuseNormQuantize
from qfuse.optimize.schedule import optimize
from qfuse.rewrite.clone import clone
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.run import random_inputs, run

pytestmark = [
    pytest.mark.property,
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore:var:UserWarning"),
]

aten = torch.ops.aten
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
NONE_OR_FLOATS = [None, None, torch.float32, torch.bfloat16]


@dataclass(frozen=True)
class Case:
    """A norm, what surrounds it, and how its result is quantized.

    Attributes:
        dtype: Type of the input.
        rank: Its rank.
        spelling: The norm.
        residual: ``none``, ``plain``, ``scaled`` or ``row``.
        quantize: ``static``, ``uint8``, ``feature``, or a formula per token or tensor.
        readers: What else is read, before or after the quantize.
    """

    dtype: torch.dtype
    rank: int
    spelling: Spelling
    residual: str
    quantize: str
    users: tuple[str, ...]


@st.composite
def spellings(draw: st.DrawFn) -> Spelling:
    def pick(*choices: object) -> object:
        return draw(st.sampled_from(choices))

    layer = draw(st.booleans())
    return Spelling(
        wide=draw(st.sampled_from(NONE_OR_FLOATS)),
        square=str(pick("pow", "square", "mul")),
        axes=draw(st.integers(1, 2)),
        eps=str(pick("number", "tensor", "tensor-first")),
        root=str(pick("rsqrt", "reciprocal", "one-over", "divided-one", "power", "divide")),
        narrow_factor=draw(st.booleans()),
        scale_input=draw(st.booleans()),
        swapped=draw(st.booleans()),
        rounded=draw(st.sampled_from(NONE_OR_FLOATS)),
        weight=str(pick("none", "plain", "one-plus", "rows", "full", "scalar")),
        weight_dtype=draw(st.sampled_from(FLOATS)),
        out=draw(st.sampled_from(NONE_OR_FLOATS)),
        centre=str(pick("once", "twice")) if layer else "none",
        variance=str(pick("squares", "var.dim", "var.correction")) if layer else "squares",
        bias=layer and draw(st.booleans()),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    users = ("early result", "late result", "early sum", "late sum", "caller", "quantize")
    return Case(
        draw(st.sampled_from(FLOATS)),
        draw(st.integers(2, 4)),
        draw(spellings()),
        draw(st.sampled_from(["none", "plain", "plain", "scaled", "row"])),
        draw(st.sampled_from(["static", "uint8", "feature", "float8", "token", "tensor"])),
        tuple(draw(st.lists(st.sampled_from(users), max_size=2, unique=True))),
    )


def build(case: Case) -> NormalGraph:
    w = Writer(*(2, "m", 6, 5)[-case.rank :], dtype=case.dtype)
    x = w.x
    if case.residual != "none":
        other = w.const(torch.randn(5).to(case.dtype)) if case.residual == "row" else w.arg("r")
        alpha = 2 if case.residual == "scaled" else 1
        x = w.call(aten.add.Tensor, x, other, alpha=alpha)
    y = w.spelled(case.spelling, x)
    early = [x] if "early sum" in case.users else []
    early += [y] if "early result" in case.users else []
    outs = [w.call(aten.neg.default, node) for node in early]
    outs.append(quantized(w, y, case.quantize))
    late = [x] if "late sum" in case.users else []
    late += [y] if "late result" in case.users else []
    outs += [w.call(aten.neg.default, node) for node in late]
    outs += [w.static(y, torch.uint8)] if "quantize" in case.users else []
    outs += [y] if "caller" in case.users else []
    return w.b.done(*outs)


def quantized(w: Writer, y: Node, kind: str) -> Node:
    rank = len(y.meta["val"].shape)
    if kind == "token":
        return w.dynamic(y, Formula.AO_ASYMMETRIC)
    if kind == "tensor":
        return w.dynamic(y, Formula.AO_SYMMETRIC, (None,) * rank)
    if kind == "float8":
        return w.dynamic(y, Formula.AO_FLOAT8)
    block = (*(None,) * (rank - 1), 1) if kind == "feature" else None
    return w.static(y, torch.uint8 if kind == "uint8" else torch.int8, block)


def is_said(case: Case) -> bool:
    """Whether a norm spec says this spelling."""
    s = case.spelling
    compute = s.wide or case.dtype
    scales_input = s.scale_input and s.centre != "once"
    if scales_input and not widens(case.dtype, compute):
        return False  # The statistics are those of rounded numbers, what they scale is not.
    if s.weight == "scalar" and s.weight_dtype != normalized_type(case):
        return False  # On which side a scalar stands decides whether torch rounds it.
    if not s.narrow_factor or case.dtype == compute:
        return True
    scaled = case.dtype if scales_input and s.centre == "none" else compute
    product = torch.promote_types(scaled, case.dtype)
    return case.dtype == product or widens(compute, case.dtype)


def normalized_type(case: Case) -> torch.dtype:
    """The type of what the weight is multiplied by."""
    s = case.spelling
    if s.rounded is not None:
        return s.rounded
    compute = s.wide or case.dtype
    scaled = case.dtype if s.scale_input and s.centre == "none" else compute
    return torch.promote_types(scaled, case.dtype if s.narrow_factor else compute)


@given(case=cases(), seed=SEEDS)
def test_norms_fuse_bit_by_bit_or_not_at_all(case: Case, seed: int) -> None:
    torch.manual_seed(seed)
    program = build(case)
    source = clone(program)
    text = to_text(source.graph)
    done = optimize(program)
    verify(done)
    made = [n for n in done.graph.nodes if as_fused_norm(n) is not None]
    assert len(made) == is_said(case), f"{case}\n{text}"
    for m in (1, 3):
        inputs = random_inputs(source, m=m)
        outs = zip(run(source, inputs), run(done, inputs), results(done), strict=True)
        for old, new, node in outs:
            assert old.dtype == new.dtype, text
            assert equal_but_for_nan(old, new), f"{difference(old, new)}\n{text}"
            assert strides(old) == strides(new), f"{node}\n{text}"
    if seed % 4 == 0:
        assert_lowered_alike(done, OptimizedGraph(source.module, source.signature, source.log), m=2)
    told = apply_rules(done, [FuseNormQuantize()])
    assert not told.modified, "it is at rest"
