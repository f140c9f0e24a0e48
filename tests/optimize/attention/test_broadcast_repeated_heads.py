from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.grouped_heads import REPEATS, Grouped, expanded, interleaved
from tests.support.cases.matmul import rowwise
from tests.support.values import bits_same
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.matmul import FusedMatmul, as_fused_matmul
from qfuse.ir.ops.views import shape_of
from qfuse.ir.stages.verify import STAGES, verify_node
from qfuse.optimize import optimize
from qfuse.optimize.attention.broadcast_repeated_heads import BroadcastRepeatedHeads
from qfuse.optimize.fuse.matmul import FuseMatmul
from qfuse.optimize.propagate.sink_dequantize import SinkDequantize
from qfuse.rewrite.clone import clone
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Miss
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_tensor
from qfuse.testing.run import random_inputs, run

aten = torch.ops.aten
F32 = torch.float32
COPIES = (aten.expand.default, aten.clone.default, aten.repeat_interleave.self_int)


def optimized(program: NormalGraph, **sizes: int) -> FusedMatmul:
    """Optimize; values and strides must stay the same. Return the only product."""
    source = clone(program)
    done = optimize(program)
    for node in done.graph.nodes:
        verify_node(node, STAGES["optimized"])
    (found,) = [view for node in done.graph.nodes if (view := as_fused_matmul(node))]
    inputs = random_inputs(source, **sizes)
    got, want = run(done, inputs), run(source, inputs)
    assert bits_same(got, want)
    assert [y.stride() for y in got] == [y.stride() for y in want]
    return found


def copies(found: FusedMatmul) -> list[Node]:
    """The nodes that repeat elements."""
    return [node for node in found.node.graph.nodes if node.target in COPIES]


def refusal(case: Grouped, *outs: Node) -> Miss:
    """Return why the rule, which must refuse once, does not fire."""
    program = case.done(*outs)
    apply_rules(program, [SinkDequantize(), FuseMatmul()])
    result = apply_rules(program, [BroadcastRepeatedHeads()])
    assert not result.modified
    (miss,) = [m for _, m in result.misses]
    return miss


def test_golden_keys_are_read_where_they_are() -> None:
    case = Grouped((2, 6, "m", 8), (2, 2, 5, 8), rowwise(4))
    program = case.done(case.scores(expanded, 3))
    found = optimized(program, m=4)

    assert copies(found) == []
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[2, 6, s0, 8]
%0 = qfuse.choose_qparams(%x, 'ao-symmetric int8[-128,127] 1x1x1x* eps=1e-07 float32 int32'): (float32[2, 6, s0, 1], int32[2, 6, s0, 1])
%1 = getitem(%0, 0): float32[2, 6, s0, 1]
%2 = qfuse.quantize(%x, %1, None, 'int8[-128,127] 1x1x1x* float32 float32:reciprocal:round-zp int'): int8[2, 6, s0, 8]
%k: float32[2, 2, 5, 8]
%3 = qfuse.choose_qparams(%k, 'ao-symmetric int8[-128,127] 1x1x1x* eps=1e-07 float32 int32'): (float32[2, 2, 5, 1], int32[2, 2, 5, 1])
%4 = getitem(%3, 0): float32[2, 2, 5, 1]
%5 = qfuse.quantize(%k, %4, None, 'int8[-128,127] 1x1x1x* float32 float32:reciprocal:round-zp int'): int8[2, 2, 5, 8]
%6 = aten.unsqueeze(%5, 2): int8[2, 2, 1, 5, 8]
%7 = aten.reshape(%4, (2, 2, 1, 5)): float32[2, 2, 1, 5]
%8 = aten.unsqueeze(%7, -3): float32[2, 2, 1, 1, 5]
%9 = aten.permute(%6, (0, 1, 2, 4, 3)): int8[2, 2, 1, 8, 5]
%10 = aten.sym_size.int(%2, 2): SymInt
%11 = aten.reshape(%2, (2, 2, 3, %10, 8)): int8[2, 2, 3, s0, 8]
%12 = aten.reshape(%1, (2, 2, 3, %10, 1)): float32[2, 2, 3, s0, 1]
%13 = qfuse.matmul(%11, %12, None, 'int8[-128,127] 1x1x1x1x* float32 float32:reciprocal:round-zp int', %9, %8, None, 'int8[-128,127] 1x1x*x*x1 float32 float32:reciprocal:round-zp int', None, None, '', '', ()): float32[2, 2, 3, s0, 5]
%14 = aten.sym_size.int(%13, 3): SymInt
%15 = aten.reshape(%13, (2, 6, %14, 5)): float32[2, 6, s0, 5]
return (%15)""",
    )


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("name", REPEATS)
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_every_spelling(name: str, rows: bool, side: str) -> None:
    lead = (12,) if name == "flattened" else (2, 6)
    width = 8 if side == "keys" else 5
    specs = (rowwise(len(lead) + 2)[0], per_tensor(4) if side == "values" else rowwise(4)[1])
    case = Grouped((*lead, 7, width), (2, 2, 5, 8), specs if rows else None)
    build = case.scores if side == "keys" else case.attended
    found = optimized(case.done(build(REPEATS[name], 3)))

    assert copies(found) == []
    assert shape_of(found.x)[-4:-2] == ((4, 3) if name == "flattened" else (2, 3))
    assert shape_of(found.other)[-4:-2] == ((4, 1) if name == "flattened" else (2, 1))
    params = found.other_params
    assert params is not None
    assert all(size in {1, None} for size in params.spec.block)


@pytest.mark.numeric
def test_quantized_after_the_repetition() -> None:
    case = Grouped((2, 6, 7, 8), (2, 6, 5, 8))
    k = case.b.arg("t", F32, 2, 2, 5, 8)
    keys = case.quantized(expanded(case.b, k, 3), per_tensor(4), "t")
    turned = case.b.call(aten.transpose.int, keys, -1, -2)
    found = optimized(case.done(case.b.call(aten.matmul.default, case.x, turned)))

    assert copies(found) == []


@pytest.mark.numeric
def test_dynamic_sizes() -> None:
    case = Grouped(("b", 6, "m", 8), ("b", 2, "s", 8), rowwise(4))
    found = optimized(case.done(case.scores(expanded, 3)), b=2, m=3, s=9)

    assert copies(found) == []
    assert shape_of(found.node)[1:3] == (2, 3)


@pytest.mark.numeric
@pytest.mark.parametrize("name", ["before transpose", "expanded before transpose"])
def test_dynamic_sizes_before_a_transpose(name: str) -> None:
    case = Grouped(("b", 6, "m", 8), ("b", 2, "s", 8), rowwise(4))
    found = optimized(case.done(case.scores(REPEATS[name], 3)), b=2, m=3, s=9)

    assert copies(found) == []
    assert shape_of(found.node)[1:3] == (2, 3)


@pytest.mark.numeric
@pytest.mark.parametrize("axis", [1, 3])
def test_another_axis_that_is_repeated_before_a_transpose_is_none_of_heads(axis: int) -> None:
    case = Grouped((2, 6, 7, 8), (2, 6, 4, 4 if axis == 3 else 8))
    rows = case.b.call(aten.transpose.int, case.k, 1, 2)
    more = case.b.call(aten.repeat_interleave.self_int, rows, 2, axis)
    keys = case.b.call(aten.transpose.int, more, 1, 2)
    turned = case.b.call(aten.transpose.int, keys, -1, -2)
    found = optimized(case.done(case.b.call(aten.matmul.default, case.x, turned)))

    assert shape_of(found.node) == (2, 6, 7, 8 if axis == 1 else 4)


@pytest.mark.numeric
@pytest.mark.parametrize("sizes", [(1, 4), (2, 4), (3, 1)], ids=str)
def test_numbers_of_heads(sizes: tuple[int, int]) -> None:
    heads, group = sizes
    case = Grouped((2, heads * group, 7, 8), (2, heads, 5, 8))
    found = optimized(case.done(case.scores(interleaved, group)))

    assert len(copies(found)) == int(group == 1)
    # Copies of one head are broadcast without another axis.
    assert len(shape_of(found.x)) == (5 if group > 1 and heads > 1 else 4)


@pytest.mark.numeric
@pytest.mark.parametrize(
    "shape", [(2, 1, 1, 5), (2, 6, 7, 5), (6, 1, 5), (7, 5), (5,), (1, 1, 1, 1), (1, 6, 1, 1)]
)
def test_masks(shape: tuple[int, ...]) -> None:
    case = Grouped((2, 6, 7, 8), (2, 2, 5, 8))
    mask = case.b.arg("mask", F32, *shape)
    scaled = case.b.call(aten.mul.Tensor, case.scores(expanded, 3), 0.125)
    found = optimized(case.done(case.b.call(aten.add.Tensor, scaled, mask)))

    assert copies(found) == []
    assert str(found.epilogue) == "mul(0)|add(1,1.0)"


@pytest.mark.numeric
def test_a_quantized_result() -> None:
    case = Grouped((2, 6, 7, 5), (2, 2, 5, 8))
    out = case.quantized(case.attended(expanded, 3), per_tensor(4), "out")
    found = optimized(case.done(out))

    assert copies(found) == []
    assert found.out_params is not None
    assert found.out_params.spec.block == (None,) * 5


@pytest.mark.numeric
def test_a_batch_of_one_on_the_left() -> None:
    case = Grouped((1, 6, 7, 8), (2, 2, 5, 8))

    assert shape_of(optimized(case.done(case.scores(expanded, 3))).x) == (1, 2, 3, 7, 8)


@pytest.mark.numeric
def test_empty_operands() -> None:
    case = Grouped((2, 6, "m", 8), (2, 2, "s", 8))

    assert copies(optimized(case.done(case.scores(expanded, 3)), m=3, s=0)) == []


@pytest.mark.numeric
def test_a_repetition_with_other_users() -> None:
    case = Grouped((2, 6, 7, 8), (2, 2, 5, 8))
    keys = expanded(case.b, case.k, 3)
    turned = case.b.call(aten.transpose.int, keys, -1, -2)
    program = case.done(
        case.b.call(aten.matmul.default, case.x, turned), case.b.call(aten.exp.default, keys)
    )
    source = clone(program)
    done = optimize(program)
    inputs = random_inputs(source)
    assert bits_same(run(done, inputs), run(source, inputs))


def tiled(b: GraphBuilder, node: Node, group: int) -> Node:
    """All heads one after the other, several times."""
    return b.call(aten.repeat.default, node, [1, group, 1, 1])


@pytest.mark.parametrize("side", ["keys", "values"])
def test_heads_in_another_order_are_not_reported(side: str) -> None:
    case = Grouped((2, 6, 7, 8 if side == "keys" else 5), (2, 2, 5, 8))
    out = case.scores(tiled, 3) if side == "keys" else case.attended(tiled, 3)
    program = case.done(out)
    apply_rules(program, [SinkDequantize(), FuseMatmul()])
    result = apply_rules(program, [BroadcastRepeatedHeads()])

    assert (result.modified, list(result.misses)) == (False, [])


@pytest.mark.numeric
def test_rows_that_are_repeated_are_no_heads() -> None:
    case = Grouped((2, 6, 7, 8), (2, 6, 5, 8))
    rows = case.b.call(aten.repeat_interleave.self_int, case.k, 2, 2)
    turned = case.b.call(aten.transpose.int, rows, -1, -2)
    found = optimized(case.done(case.b.call(aten.matmul.default, case.x, turned)))

    assert shape_of(found.node) == (2, 6, 7, 10)


def test_refuses_one_head_on_the_left() -> None:
    case = Grouped((2, 1, 7, 8), (2, 2, 5, 8))

    miss = refusal(case, case.scores(expanded, 3))
    assert miss.code is MissCode.SHAPE
    assert miss.reason == "the left operand of shape (2, 1, 7, 8) does not have 6 heads"


def test_refuses_a_matrix_on_the_left() -> None:
    case = Grouped((7, 8), (2, 2, 5, 8))

    miss = refusal(case, case.scores(expanded, 3))
    assert miss.reason == "the left operand of shape (7, 8) does not have 6 heads"


def test_refuses_scales_that_differ_between_copies() -> None:
    case = Grouped((2, 6, 7, 8), (2, 2, 5, 8))
    k = case.b.arg("t", torch.int8, 2, 2, 5, 8)
    scale = case.b.const("s", torch.rand(1, 6, 1, 1) + 0.1)
    spec = per_tensor(4).with_block((None, 1, None, None))
    keys = case.b.call(ops.dequantize, expanded(case.b, k, 3), scale, None, str(spec))
    turned = case.b.call(aten.transpose.int, keys, -1, -2)

    miss = refusal(case, case.b.call(aten.matmul.default, case.x, turned))
    assert miss.code is MissCode.GRANULARITY
    assert miss.reason == "copies of one head have different scales, in blocks of *x1x*x*"


def test_refuses_a_result_that_is_quantized_per_head() -> None:
    case = Grouped((2, 6, 7, 8), (2, 2, 5, 8))
    found = case.scores(expanded, 3)
    scale = case.b.const("s", torch.rand(1, 6, 1, 1) + 0.1)
    spec = str(per_tensor(4).with_block((None, 1, None, None)))
    q = case.b.call(ops.quantize, found, scale, None, spec)
    out = case.b.call(ops.dequantize, q, scale, None, spec)
    done = optimize(case.done(out))
    (product,) = [view for node in done.graph.nodes if (view := as_fused_matmul(node))]
    assert product.out_params is None or len(shape_of(product.node)) == 4
