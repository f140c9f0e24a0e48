"""Attention of quantized tensors, for backends that claim it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.optimize.claimed.test_elementwise import quantized
from tests.support.cases.grouped_heads import Repeat, expanded, interleaved, reshaped
from torch.fx import Node

from qfuse.ir.errors import NormalizeError
from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import NormalGraph, OptimizedGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.check import problems_of
from qfuse.ir.ops.claimed.attention import Attention, AttentionSpec, as_attention
from qfuse.ir.ops.views import shape_of
from qfuse.lower import claim_ops
from qfuse.optimize import optimize, rules_for_claims
from qfuse.optimize.claimed.attention import FuseAttention
from qfuse.rewrite.clone import clone
from qfuse.rewrite.driver import apply_rules
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_tensor, per_token
from qfuse.testing.run import random_inputs, run
from qfuse.testing.terms import aten

OP = aten.scaled_dot_product_attention.default
Size = int | str
Form = Callable[[GraphBuilder], Node]
HEADS: tuple[Size, ...] = (2, 4)


def real(b: GraphBuilder, name: str, *sizes: Size, dtype: torch.dtype = torch.float32) -> Node:
    """Add an input of quantized values with a zero point, and its dequantize."""
    return quantized(b, name, *sizes, float_dtype=dtype).node


def three(
    b: GraphBuilder,
    lead: tuple[Size, ...] = HEADS,
    *,
    shared: tuple[Size, ...] | None = None,
    rows: Size = 3,
    keys: Size = 5,
    dtype: torch.dtype = torch.float32,
) -> list[Node]:
    """Add queries, keys and values, the latter of another width."""
    shared = lead if shared is None else shared
    return [
        real(b, "q", *lead, rows, 8, dtype=dtype),
        real(b, "k", *shared, keys, 8, dtype=dtype),
        real(b, "v", *shared, keys, 6, dtype=dtype),
    ]


def itself(b: GraphBuilder) -> Node:
    x = real(b, "x", 2, 4, 5, 8)
    return b.call(OP, x, x, x)


def blocks(b: GraphBuilder) -> Node:
    """Queries with a scale per token, keys with one per group of features, float values."""
    found = []
    for name, spec in (("q", per_token(4)), ("k", per_tensor(4).with_block((1, 1, 1, 4)))):
        grid = spec.grid((2, 4, 5, 8))
        scale = b.const(f"{name}_scale", torch.rand([int(n) for n in grid]) * 0.02 + 1e-2)
        q = b.arg(name, torch.int8, 2, 4, 5, 8)
        found.append(b.call(ops.dequantize, q, scale, None, str(spec)))
    return b.call(OP, *found, b.arg("v", torch.float32, 2, 4, 5, 8))


def masked(b: GraphBuilder, mask: Node) -> Node:
    return b.call(OP, *three(b), mask)


FORMS: dict[str, tuple[Form, str]] = {
    "plain": (lambda b: b.call(OP, *three(b)), "full"),
    "scale": (lambda b: b.call(OP, *three(b), scale=0.3), "full scale=0.3"),
    "whole scale": (lambda b: b.call(OP, *three(b), scale=2), "full scale=2.0"),
    "causal": (lambda b: b.call(OP, *three(b), None, 0.0, True), "causal"),
    "one sequence": (lambda b: b.call(OP, *three(b, ())), "full"),
    "three axes": (lambda b: b.call(OP, *three(b, (2,))), "full"),
    "five axes": (lambda b: b.call(OP, *three(b, (2, 1, 4))), "full"),
    "broadcast": (lambda b: b.call(OP, *three(b, (2, 4), shared=(1, 4))), "full"),
    "heads": (
        lambda b: b.call(OP, *three(b, (2, 6), shared=(2, 3)), enable_gqa=True),
        "full grouped",
    ),
    "causal heads": (
        lambda b: b.call(
            OP, *three(b, (2, 6), shared=(2, 1)), None, 0.0, True, scale=0.5, enable_gqa=True
        ),
        "causal scale=0.5 grouped",
    ),
    "dynamic": (lambda b: b.call(OP, *three(b, ("n", 4), rows="m", keys="s")), "full"),
    "dynamic, causal": (
        lambda b: b.call(OP, *three(b, ("n", 4), rows="m", keys="s"), None, 0.0, True),
        "causal",
    ),
    "float mask": (lambda b: masked(b, b.const("mask", torch.randn(3, 5))), "full"),
    "mask of heads": (lambda b: masked(b, b.arg("mask", torch.float32, 2, 1, 1, 5)), "full"),
    "bool mask": (lambda b: masked(b, b.const("mask", torch.ones(3, 5).tril().bool())), "full"),
    "mask of run time": (
        lambda b: masked(b, b.call(aten.gt.Scalar, b.arg("m", torch.float32, 4, 3, 5), 0.0)),
        "full",
    ),
    "itself": (itself, "full"),
    "blocks": (blocks, "full"),
    "bfloat16": (lambda b: b.call(OP, *three(b, dtype=torch.bfloat16)), "full"),
    "float mask, bfloat16": (
        lambda b: b.call(OP, *three(b, dtype=torch.bfloat16), b.arg("m", torch.bfloat16, 3, 5)),
        "full",
    ),
}


def source(form: Form, *, out: bool = True, also: bool = False) -> NormalGraph:
    """Return a graph with an attention whose result is quantized, or also returned."""
    b = GraphBuilder()
    y = form(b)
    if not out:
        return b.done(y)
    value = y.meta["val"]
    spec = per_tensor(value.dim(), torch.uint8, float_dtype=value.dtype)
    ones = [1] * value.dim()
    scale = b.const("y_scale", torch.full(ones, 0.01))
    zero = b.const("y_zero", torch.full(ones, 120, dtype=torch.int32))
    q = b.call(ops.quantize, y, scale, zero, str(spec))
    return b.done(q, y) if also else b.done(q)


def the_attention(program: Any) -> Attention:
    (fused,) = (view for node in program.graph.nodes if (view := as_attention(node)))
    return fused


def test_golden() -> None:
    program = source(lambda b: b.call(OP, *three(b, ()), None, 0.0, True))
    assert apply_rules(program, [FuseAttention()]).fired == {"fuse-attention": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
const %q_scale: float32[1, 1]
const %q_zero: int32[1, 1]
%q: int8[3, 8]
const %k_scale: float32[1, 1]
const %k_zero: int32[1, 1]
%k: int8[5, 8]
const %v_scale: float32[1, 1]
const %v_zero: int32[1, 1]
%v: int8[5, 6]
const %y_scale: float32[1, 1]
const %y_zero: int32[1, 1]
%0 = qfuse.scaled_dot_product_attention(%q, %q_scale, %q_zero, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int', %k, %k_scale, %k_zero, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int', %v, %v_scale, %v_zero, 'int8[-128,127] *x* float32 float32:reciprocal:round-zp int', None, %y_scale, %y_zero, 'uint8[0,255] *x* float32 float32:reciprocal:round-zp int', 'causal'): uint8[3, 6]
return (%0)""",
    )


@pytest.mark.numeric
@pytest.mark.parametrize("form", list(FORMS))
def test_values_have_the_same_bits(form: str) -> None:
    build, text = FORMS[form]
    program = source(build)
    before = clone(program)
    assert apply_rules(program, [FuseAttention()]).fired == {"fuse-attention": 1}
    fused = the_attention(program)
    assert fused.out_params is not None
    assert (str(fused.attention), str(AttentionSpec.parse(text))) == (text, text)
    assert list(problems_of(fused)) == []
    other = clone(program)
    optimized = OptimizedGraph(other.module, other.signature, other.log)
    expanded = claim_ops(optimized, [])
    assert [node.target for node in expanded.graph.nodes].count(OP) == 1
    for n in (1, 3):
        inputs = random_inputs(before, n=n, m=n + 1, s=2 * n)
        (want,) = run(before, inputs)
        for found in (program, expanded):
            (got,) = run(found, inputs)
            assert torch.equal(got, want)
            assert got.stride() == want.stride()


@pytest.mark.numeric
def test_a_float_result_has_the_bits_and_strides_of_the_source() -> None:
    program = source(FORMS["plain"][0], out=False)
    before = clone(program)
    apply_rules(program, [FuseAttention()])
    inputs = random_inputs(before)
    ((want,), (got,)) = (run(each, inputs) for each in (before, program))
    assert the_attention(program).out_params is None
    assert torch.equal(got, want)
    assert got.stride() == want.stride()


def test_a_float_result_with_other_users_stays_float() -> None:
    program = source(FORMS["plain"][0], also=True)
    apply_rules(program, [FuseAttention()])
    assert the_attention(program).out_params is None
    assert [node.target for node in program.graph.nodes].count(ops.quantize) == 1


def floats(b: GraphBuilder) -> Node:
    return b.call(OP, *[b.arg(name, torch.float32, 2, 3, 8) for name in "qkv"])


def test_a_quantized_result_is_enough() -> None:
    program = source(floats)
    apply_rules(program, [FuseAttention()])
    fused = the_attention(program)
    assert fused.query_params is None
    assert fused.out_params is not None


@pytest.mark.parametrize(
    ("form", "code"),
    [
        (floats, MissCode.NOT_QUANTIZED),
        (lambda b: b.call(OP, *three(b), None, 0.25), MissCode.ARGUMENT),
        # The scores would have more batches than the queries.
        (lambda b: masked(b, b.arg("m", torch.float32, 3, 1, 1, 3, 5)), MissCode.ARGUMENT),
    ],
)
def test_refuses(form: Form, code: MissCode) -> None:
    program = source(form, out=False)
    before = to_text(program.graph)
    (node,) = program.graph.find_nodes(op="call_function", target=OP)
    miss = FuseAttention().match(node)
    assert not apply_rules(program, [FuseAttention()]).modified
    assert to_text(program.graph) == before
    assert (miss.code, miss.at) == (code, node)  # type: ignore[union-attr]


def test_refuses_a_scale_of_run_time() -> None:
    b = GraphBuilder()
    rows = b.call(aten.sym_size.int, b.arg("x", torch.float32, "n", 8), 0)
    y = b.call(OP, *three(b))
    program = b.done(y)
    y.update_kwarg("scale", rows)
    miss = FuseAttention().match(y)
    assert program.graph is y.graph
    assert (miss.code, miss.at) == (MissCode.ARGUMENT, y)  # type: ignore[union-attr]


def called(
    b: GraphBuilder, text: str = "full", **other: tuple[torch.dtype, tuple[int, ...]]
) -> Attention:
    """Return the view of a call whose named operands are others than those that fit."""
    fit = {"q": (2, 4, 3, 8), "k": (2, 4, 5, 8), "v": (2, 4, 5, 6)}
    kinds = {name: (torch.float32, shape) for name, shape in fit.items()} | other
    nodes = {name: b.arg(name, kind, *shape) for name, (kind, shape) in kinds.items()}
    args: list[Any] = [part for name in "qkv" for part in (nodes[name], None, None, "")]
    args += [nodes.get("mask"), None, None, "", text]
    with b.graph.inserting_after():
        node = b.graph.call_function(ops.scaled_dot_product_attention, tuple(args))
    node.meta["val"] = torch.empty(2, 4, 3, 6)
    fused = as_attention(node)
    assert fused is not None
    return fused


F32 = torch.float32


@pytest.mark.parametrize(
    ("text", "other", "problem"),
    [
        ("full", {}, None),
        ("full", {"k": (torch.float64, (2, 4, 5, 8))}, "queries, keys and values are"),
        ("full", {"v": (torch.bfloat16, (2, 4, 5, 6))}, "queries, keys and values are"),
        ("full", {"mask": (torch.int64, (3, 5))}, "a mask of torch.int64"),
        ("full", {"mask": (torch.float16, (3, 5))}, "a mask of torch.float16"),
        ("full", {"mask": (torch.bool, (5, 5))}, "a mask of shape (5, 5)"),
        ("full", {"mask": (F32, (3, 2, 4, 3, 5))}, "a mask of shape"),
        ("causal", {"mask": (F32, (3, 5))}, "a mask, and a causal mask"),
        ("full", {"q": (F32, (2, 4, 3, 7))}, "of shapes"),
        ("full", {"v": (F32, (2, 4, 4, 6))}, "of shapes"),
        ("full", {"k": (F32, (3, 4, 5, 8))}, "of shapes"),
        ("full", {"q": (F32, (8,))}, "operands of rank 1, 4 and 4"),
        ("full", {"q": (F32, (2, 4, 2, 8))}, "a result of shape"),
        ("full grouped", {"k": (F32, (2, 2, 5, 8)), "v": (F32, (2, 1, 5, 6))}, None),
        ("full grouped", {"k": (F32, (2, 3, 5, 8))}, "of shapes"),
        ("full grouped", {"q": (F32, (3, 8))}, "operands of rank 2, 4 and 4"),
        ("full", {"k": (F32, (2, 2, 5, 8))}, "of shapes"),
    ],
)
def test_calls_are_verified(text: str, other: dict[str, Any], problem: str | None) -> None:
    found = list(problems_of(called(GraphBuilder(), text, **other)))
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]


@pytest.mark.numeric
@pytest.mark.parametrize("quantized_heads", [False, True], ids=["float", "quantized"])
@pytest.mark.parametrize("repeat", [expanded, reshaped, interleaved])
def test_copies_of_heads_are_found_before_it_is_fused(
    repeat: Repeat, quantized_heads: bool
) -> None:
    b = GraphBuilder()
    shape = (2, 2, 5, 8)
    shared = [
        real(b, name, *shape) if quantized_heads else b.arg(name, torch.float32, *shape)
        for name in "kv"
    ]
    copies = [repeat(b, part, 3) for part in shared]
    program = b.done(b.call(OP, real(b, "q", 2, 6, 3, 8), *copies))
    before = clone(program)
    added = rules_for_claims({ops.scaled_dot_product_attention})
    done = optimize(program, added=added)
    fused = the_attention(done)
    assert [tuple(shape_of(part)) for part in (fused.key, fused.value)] == [shape, shape]
    assert not done.graph.find_nodes(op="call_function", target=aten.expand.default)
    assert (fused.key_params is not None) == quantized_heads
    assert fused.attention.grouped
    inputs = random_inputs(before)
    ((want,), (got,)) = (run(each, inputs) for each in (before, done))
    assert torch.equal(got, want)


def test_only_a_backend_that_claims_it_has_it() -> None:
    program = source(FORMS["plain"][0])
    plain = optimize(clone(program), added=rules_for_claims({ops.elementwise}))
    claimed = optimize(program, added=rules_for_claims({ops.scaled_dot_product_attention}))
    found = [[as_attention(n) for n in g.graph.nodes] for g in (plain, claimed)]
    assert [sum(view is not None for view in views) for views in found] == [0, 1]


@pytest.mark.parametrize(
    "text", ["", "half", "full scale=x", "full grouped causal", "causal scale="]
)
def test_other_text_is_an_error(text: str) -> None:
    with pytest.raises(NormalizeError):
        AttentionSpec.parse(text)
