from __future__ import annotations

import pytest
import torch

from qfuse.ir.events import Missed
from qfuse.ir.graph.stage_graph import OptimizedGraph
from qfuse.ir.ops import library as ops
from qfuse.lower.unfused import is_needed, reason_to_stay
from qfuse.optimize import optimize
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import QuantizedLinear, per_channel, per_tensor

aten = torch.ops.aten


def reasons(program: OptimizedGraph, op: torch._ops.OpOverload) -> list[str]:
    """Why each call of an op is there."""
    return [reason_to_stay(node) for node in program.graph.nodes if node.target is op]


def test_a_view_hides_no_reader() -> None:
    b = GraphBuilder()
    block = QuantizedLinear(b, 4, 8)
    x = b.call(aten.neg.default, b.arg("x", torch.float32, 2, 3, 8))
    q, scale, zero = block.stored(x, per_tensor(3))
    flat = b.call(aten.view.default, q, [6, 8])
    parts = [b.call(aten.view.default, p, [1, 1]) for p in (scale, zero)]
    real = b.call(ops.dequantize, flat, *parts, str(per_tensor(2)))
    program = optimize(b.done(block.linear(real)))

    told = reasons(program, ops.quantize)
    assert told == [
        "it is fed by aten.neg, which has no quantized output here; it feeds 1 quantized op"
    ]


def test_a_requantize_stands_between_two_edges() -> None:
    b = GraphBuilder()
    spec = str(per_tensor(2))
    q = b.arg("q", torch.int8, 2, 8)
    first, second = (b.const(f"s{i}", torch.tensor([[0.1 + i]])) for i in range(2))
    real = b.call(ops.dequantize, q, first, None, spec)
    again = b.call(ops.quantize, real, second, None, spec)
    program = optimize(b.done(b.call(ops.dequantize, again, second, None, spec)))

    assert reasons(program, ops.requantize) == [
        "it changes the parameters between two quantized ops"
    ]


def test_of_two_quantizes_of_one_norm_the_second_stays() -> None:
    b = GraphBuilder()
    block = QuantizedLinear(b, 4, 8)
    x = b.arg("x", torch.float32, 6, 8)
    y = b.call(aten.layer_norm.default, x, [8], None, None, 1e-5, False)
    first, _, _ = block.stored(y, per_tensor(2))
    second, _, _ = block.stored(y, per_tensor(2, torch.uint8), "other")
    program = optimize(b.done(first, second))

    (told,) = reasons(program, ops.quantize)
    assert told == (
        "qfuse.layer_norm already returns a quantized result with other parameters; "
        "its quantized values are a result or the state of the model"
    )


def test_attention_does_not_quantize_its_weights() -> None:
    b = GraphBuilder()
    block = QuantizedLinear(b, 1, 1)
    parts = [
        block.quantized(b.arg(name, torch.float32, 2, 3, 5, 8), per_tensor(4), name)
        for name in ("q", "k", "v")
    ]
    out = b.call(aten.scaled_dot_product_attention.default, *parts)
    program = optimize(b.done(out))

    told = (
        "aten.scaled_dot_product_attention computes in float, since it does not quantize the "
        "weights that it multiplies with the values: write matmul, softmax, a quantize and "
        "matmul instead"
    )
    assert reasons(program, ops.dequantize) == [told] * 3


def test_a_shift_of_integers_hides_no_reader() -> None:
    b = GraphBuilder()
    block = QuantizedLinear(b, 4, 8)
    q, scale, _ = block.stored(b.arg("x", torch.float32, 6, 8), per_tensor(2, torch.uint8))
    wide = b.call(aten.sub.Tensor, b.call(aten._to_copy.default, q, dtype=torch.int32), 128)
    narrow = b.call(aten._to_copy.default, wide, dtype=torch.int8)
    real = b.call(ops.dequantize, narrow, scale, None, str(per_tensor(2)))
    program = optimize(b.done(block.linear(real)))

    told = reasons(program, ops.quantize)
    assert told == ["it quantizes an input of the model; it feeds 1 quantized op"]
    (quantize,) = (node for node in program.graph.nodes if node.target is ops.quantize)
    assert is_needed(quantize)


def test_a_bag_reads_rows() -> None:
    b = GraphBuilder()
    weight = QuantizedLinear(b, 100, 8).weight_node()
    rows, at = b.arg("rows", torch.int64, 7), b.arg("at", torch.int64, 3)
    bag = b.call(aten.embedding_bag.padding_idx, weight, rows, at, False, 0, False, None, False, -1)
    program = optimize(b.done(b.item(bag, 0)))

    told = (
        "aten.embedding_bag.padding_idx sums these rows in floats; only the rows that it reads are "
        "dequantized"
    )
    assert told in reasons(program, ops.dequantize)
    # The rule does not report that it has nothing more to do.
    assert not [miss for miss in program.log.of(Missed) if miss.rule == "sink-below-bag-lookup"]


def dequantized(b: GraphBuilder, q: torch.fx.Node) -> torch.fx.Node:
    rank = q.meta["val"].dim()
    scale = b.const("scale", torch.full([1] * rank, 0.1))
    return b.call(ops.dequantize, q, scale, None, str(per_tensor(rank)))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (
            "rows",
            "aten.gelu computes in float on these rows; only those that it reads are dequantized",
        ),
        ("input", "aten.gelu computes in float on this quantized input of the model"),
    ],
)
def test_what_nothing_here_quantized_is_needed_in_float(kind: str, told: str) -> None:
    b = GraphBuilder()
    if kind == "rows":
        table = b.const("table", torch.ones(100, 8, dtype=torch.int8))
        q = b.call(aten.embedding.default, table, b.arg("ids", torch.int64, 7))
    else:
        q = b.call(aten.view.default, b.arg("q", torch.int8, 7, 8), [8, 7])
    program = optimize(b.done(b.call(aten.gelu.default, dequantized(b, q))))

    (left,) = (node for node in program.graph.nodes if node.target is ops.dequantize)
    assert (reason_to_stay(left), is_needed(left)) == (told, True)


def test_rows_that_a_constant_multiplies_are_no_weight() -> None:
    b = GraphBuilder()
    table = b.const("table", torch.ones(100, 8, dtype=torch.int8))
    q = b.call(aten.embedding.default, table, b.arg("ids", torch.int64, 7))
    out = b.call(aten.linear.default, dequantized(b, q), b.const("w", torch.ones(4, 8)))
    program = optimize(b.done(out))

    (left,) = (node for node in program.graph.nodes if node.target is ops.dequantize)
    assert reason_to_stay(left).startswith("aten.linear computes in float on these rows")
    assert is_needed(left)


def test_what_a_quantize_here_made_is_not_needed_in_float() -> None:
    b = GraphBuilder()
    q, _, _ = QuantizedLinear(b, 4, 8).stored(b.arg("x", torch.float32, 6, 8), per_tensor(2))
    moved = b.call(aten.view.default, q, [8, 6])
    program = optimize(b.done(b.call(aten.gelu.default, dequantized(b, moved))))

    (left,) = (node for node in program.graph.nodes if node.target is ops.dequantize)
    assert (
        reason_to_stay(left)
        == "its float values are used by aten.gelu, which no rule fused with it"
    )
    assert not is_needed(left)


def test_a_quantize_for_a_cache_is_needed() -> None:
    b = GraphBuilder()
    cache, at = b.arg("cache", torch.int8, 9, 8), b.arg("at", torch.int64, 6)
    q, _, _ = QuantizedLinear(b, 4, 8).stored(b.arg("x", torch.float32, 6, 8), per_tensor(2))
    kept = b.call(aten.index_copy.default, cache, 0, at, q)
    program = optimize(b.done(kept))

    (quantize,) = (node for node in program.graph.nodes if node.target is ops.quantize)
    told = (
        "it quantizes an input of the model; its quantized values are a result or the state of the "
        "model"
    )
    assert (reason_to_stay(quantize), is_needed(quantize)) == (told, True)


def test_what_an_epilogue_adds_is_no_weight() -> None:
    b = GraphBuilder()
    block = QuantizedLinear(b, 4, 8)
    q = b.const("addend", torch.ones(6, 4, dtype=torch.int8))
    # No epilogue reads a scale per row.
    rows = b.call(ops.dequantize, q, b.const("rows", torch.ones(6, 1)), None, str(per_channel(2)))
    y = block.linear(b.arg("x", torch.float32, 6, 8))
    program = optimize(b.done(b.call(aten.add.Tensor, y, rows)))

    left = next(n for n in program.graph.nodes if n.target is ops.dequantize)
    told = "qfuse.linear adds or multiplies it in float, behind the sum of its integers"
    assert (reason_to_stay(left), is_needed(left)) == (told, True)
