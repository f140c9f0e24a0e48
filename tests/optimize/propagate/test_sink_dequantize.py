from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.propagate import Graph, applied, only_miss, priced, spec_of, steps

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.spec import Block
from qfuse.optimize.propagate.sink_dequantize import SinkDequantize
from qfuse.testing.quant import QuantizedLinear

aten = torch.ops.aten


def dequantized(g: Graph, q: Any, *block: int | None, **changes: Any) -> Any:
    """A dequantize of quantized values."""
    spec = spec_of(*block, **changes)
    return g.dequantize(q, spec, g.params(q, spec))


@pytest.mark.numeric
def test_golden_a_chain_of_movements_goes_above() -> None:
    g = Graph(1)
    x = dequantized(g, g.stored(2, 6, 8), None, None, None)
    heads = g.call(aten.view.default, x, [2, 6, 2, 4])
    program = g.done(g.call(aten.permute.default, heads, [0, 2, 1, 3]))

    assert applied(program, SinkDequantize).fired == {"sink-dequantize": 2}
    assert steps(program) == [
        *("reshape[2, 6, 2, 4]", "permute[2, 2, 6, 4]"),
        *("dequantize[2, 2, 6, 4]", "neg[2, 2, 6, 4]"),
    ]
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[1]
%q1: int8[2, 6, 8]
%0 = aten.reshape(%q1, (2, 6, 2, 4)): int8[2, 6, 2, 4]
const %scale2_1: float32[1, 1, 1, 1]
const %zero3_1: int32[1, 1, 1, 1]
%1 = aten.permute(%0, (0, 2, 1, 3)): int8[2, 2, 6, 4]
%2 = qfuse.dequantize(%1, %scale2_1, %zero3_1, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int'): float32[2, 2, 6, 4]
%3 = aten.neg(%2): float32[2, 2, 6, 4]
return (%3)""",
    )


MOVEMENTS: dict[str, tuple[Any, tuple[Any, ...], Block, str]] = {
    "rows": (aten.view.default, ([12, 8],), (1, 1, None), "1x*"),
    "heads": (aten.view.default, ([2, 6, 2, 4],), (None, None, 1), "*x*x1x1"),
    "groups": (aten.view.default, ([12, 2, 4],), (1, 1, 4), "1x1x*"),
    "permute": (aten.permute.default, ([2, 0, 1],), (1, None, None), "*x1x*"),
    "flip": (aten.flip.default, ([1],), (None, 1, None), "*x1x*"),
    "roll": (aten.roll.default, ([2], [1]), (None, 2, None), "*x2x*"),
    "clone": (aten.clone.default, (), (1, None, 3), "1x*x3"),
    "slice": (aten.slice.Tensor, (1, 2, 4), (None, 2, 1), "*x*x1"),
    "rows of a slice": (aten.slice.Tensor, (1, 1, 4), (None, 1, None), "*x1x*"),
    "select": (aten.select.int, (1, 2), (1, 1, None), "1x*"),
    "repeat": (aten.repeat.default, ([1, 2, 1],), (1, None, None), "1x*x*"),
    "each": (aten.repeat_interleave.self_int, (2, 1), (1, 2, None), "1x4x*"),
    "mirror": (aten.pad.default, ([1, 2], "reflect"), (None, 1, None), "*x1x*"),
    "edge": (aten.pad.default, ([1, 2], "replicate"), (1, None, None), "1x*x*"),
}


@pytest.mark.numeric
@pytest.mark.parametrize("name", list(MOVEMENTS))
@pytest.mark.parametrize("float_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parameters_move_along(name: str, float_dtype: torch.dtype) -> None:
    op, args, block, below = MOVEMENTS[name]
    g = Graph(1)
    x = dequantized(g, g.stored(2, 6, 8), *block, float_dtype=float_dtype)
    program = g.done(g.call(op, x, *args))

    assert applied(program, SinkDequantize).fired == {"sink-dequantize": 1}
    (made,) = [n for n in program.graph.nodes if n.target is ops.dequantize]
    assert f" {below} " in made.args[3]


@pytest.mark.numeric
def test_constants_move_before_the_first_call() -> None:
    g = Graph(1)
    table = g.constant(torch.randint(-128, 128, (6, 8)).to(torch.int8), "table")
    program = g.done(g.call(aten.slice.Tensor, dequantized(g, table, 1, None), 0, 1, 4))

    applied(program, SinkDequantize)
    assert steps(program) == ["dequantize[3, 8]", "neg[3, 8]"]


@pytest.mark.numeric
@pytest.mark.parametrize("m", [1, 5])
def test_rows_of_a_dynamic_number(m: int) -> None:
    g = Graph("m", 6, 8)
    spec = spec_of(1, 1, None)
    params = g.choose(g.x, (1, 1, None))
    x = g.dequantize(g.quantize(g.x, spec, params), spec, params)
    program = g.done(g.call(aten.view.default, x, [-1, 8]))

    assert applied(program, SinkDequantize, m=m).fired == {"sink-dequantize": 1}


@pytest.mark.numeric
def test_every_part_takes_its_share() -> None:
    g = Graph(1)
    x = dequantized(g, g.stored(4, 12), 1, None)
    parts = [g.call(aten.slice.Tensor, x, 1, start, start + 4) for start in (0, 4, 8)]
    program = g.done(*parts)

    assert applied(program, SinkDequantize, context=priced()).fired == {"sink-dequantize": 3}


@pytest.mark.numeric
def test_a_linear_reads_the_stored_numbers_of_a_shared_dequantize() -> None:
    g = Graph(1)
    x = dequantized(g, g.stored(2, 3, 8), None, None, None)
    flat = g.call(aten.view.default, x, [6, 8])
    program = g.done(QuantizedLinear(g.b, 4, 8).linear(flat), x)

    assert applied(program, SinkDequantize, context=priced()).fired == {"sink-dequantize": 1}


def image(g: Graph) -> Any:
    """A dequantize of an image, which is also used as it is."""
    return dequantized(g, g.stored(1, 6, 8, 8), None, None, None, None)


def convolved(g: Graph, x: Any) -> Any:
    """A convolution with a quantized weight."""
    w = g.constant(torch.randint(-128, 128, (4, 3, 3, 3), dtype=torch.int8), "weight")
    return g.call(aten.convolution.default, x, dequantized(g, w, 1, None, None, None), None, *CONV)


CONV = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
PARTS: dict[str, Any] = {
    "half of the channels": lambda g, x: g.call(aten.slice.Tensor, x, 1, 0, 3),
    "a crop of it": lambda g, x: g.call(
        aten.slice.Tensor, g.call(aten.slice.Tensor, x, 1, 3, 6), 2, 1, 7
    ),
    "padded": lambda g, x: g.call(
        aten.constant_pad_nd.default, g.call(aten.slice.Tensor, x, 1, 0, 3), [1, 1, 1, 1], 0.0
    ),
    "pooled": lambda g, x: g.call(
        aten.max_pool2d.default, g.call(aten.slice.Tensor, x, 1, 0, 3), [2, 2]
    ),
}


@pytest.mark.numeric
@pytest.mark.parametrize("case", PARTS)
def test_a_convolution_reads_quantized_values_of_a_part_of_a_shared_image(case: str) -> None:
    g = Graph(1)
    x = image(g)
    program = g.done(convolved(g, PARTS[case](g, x)), g.call(aten.mul.Tensor, x, 2.0))

    assert applied(program, SinkDequantize, context=priced()).fired["sink-dequantize"] >= 1
    (conv,) = [n for n in program.graph.nodes if n.target is aten.convolution.default]
    assert conv.args[0].target is ops.dequantize


@pytest.mark.numeric
def test_a_part_has_another_user_besides_a_convolution() -> None:
    g = Graph(1)
    x = image(g)
    part = PARTS["half of the channels"](g, x)
    program = g.done(convolved(g, part), g.call(aten.mul.Tensor, part, 2.0), x)

    assert applied(program, SinkDequantize, context=priced()).fired["sink-dequantize"] >= 1
    (conv,) = [n for n in program.graph.nodes if n.target is aten.convolution.default]
    assert conv.args[0].target is ops.dequantize


@pytest.mark.parametrize("kind", ["float weight", "as a weight", "two users below"])
def test_refuses_a_part_that_no_product_reads_quantized(kind: str) -> None:
    g = Graph(1)
    x = image(g)
    part = PARTS["half of the channels"](g, x)
    if kind == "float weight":
        weight = g.constant(torch.randn(4, 3, 3, 3), "weight")
        out = [g.call(aten.convolution.default, part, weight, None, *CONV)]
    elif kind == "as a weight":
        out = [
            g.call(
                aten.convolution.default,
                dequantized(g, g.stored(1, 3, 9, 9), *4 * [None]),
                part,
                None,
                *CONV,
            )
        ]
    else:
        crop = g.call(aten.slice.Tensor, part, 2, 1, 7)
        out = [g.call(aten.neg.default, crop), g.call(aten.mul.Tensor, crop, 2.0)]
    program = g.done(*out, x)

    result = applied(program, SinkDequantize, context=priced())
    assert (MissCode.SHARED, x) in [(miss.code, miss.at) for _, miss in result.misses]


def test_refuses_a_dequantize_that_something_else_reads() -> None:
    g = Graph(1)
    x = dequantized(g, g.stored(2, 6), None, None)
    program = g.done(g.call(aten.view.default, x, [12]), x)

    miss = only_miss(program, SinkDequantize)
    assert (miss.code, miss.at) == (MissCode.SHARED, x)


def test_refuses_a_block_that_is_cut() -> None:
    g = Graph(1)
    x = dequantized(g, g.stored(2, 6), None, 4)
    program = g.done(g.call(aten.slice.Tensor, x, 1, 1, 6))

    miss = only_miss(program, SinkDequantize)
    assert miss.code is MissCode.GRANULARITY
    assert "inside a block of 4" in miss.reason


def test_refuses_to_dequantize_for_two_movements() -> None:
    g = Graph(1)
    x = dequantized(g, g.stored(2, 6), None, None)
    moved = g.call(aten.view.default, x, [12]), g.call(aten.view.default, x, [3, 4])
    program = g.done(*moved)

    result = applied(program, SinkDequantize, context=priced())
    assert [miss.code for _, miss in result.misses] == [MissCode.PROFIT] * 2


def test_refuses_copies_that_a_view_may_show_as_one() -> None:
    g = Graph(1)
    x = dequantized(g, g.stored(2, 1), None, None)
    program = g.done(g.call(aten.expand.default, x, [2, 64]))

    assert only_miss(program, SinkDequantize).code is MissCode.SHAPE


def test_refuses_strides_that_the_caller_would_see() -> None:
    g = Graph(1)
    x = dequantized(g, g.stored(2, 6), None, None)
    program = g.b.done(g.call(aten.slice.Tensor, x, 1, 0, 3))

    assert only_miss(program, SinkDequantize).code is MissCode.SHAPE


@pytest.mark.numeric
def test_rows_of_a_quantized_table() -> None:
    g = Graph(1)
    spec = spec_of(1, 4)
    table = g.constant(torch.randint(-128, 128, (9, 8)).to(torch.int8), "table")
    index = g.constant(torch.randint(0, 9, (2, 3)), "index")
    x = g.dequantize(table, spec, g.params(table, spec))
    program = g.done(g.call(aten.embedding.default, x, index))

    assert applied(program, SinkDequantize, context=priced()).fired == {"sink-dequantize": 1}
    assert "dequantize[2, 3, 8]" in steps(program)


@pytest.mark.numeric
def test_gathered_elements_of_rows() -> None:
    g = Graph(1)
    x = dequantized(g, g.stored(4, 6), 1, None)
    index = g.constant(torch.randint(0, 6, (3, 9)), "index")
    program = g.done(g.call(aten.gather.default, x, 1, index))

    assert applied(program, SinkDequantize).fired == {"sink-dequantize": 1}


@pytest.mark.parametrize(
    ("op", "args"),
    [(aten.as_strided.default, ([2, 3], [1, 2])), (aten.roll.default, ([1],))],
    ids=str,
)
def test_refuses_what_is_not_covered_by_name(op: Any, args: tuple[Any, ...]) -> None:
    g = Graph(1)
    y = g.call(op, dequantized(g, g.stored(2, 6), None, None), *args)
    miss = only_miss(g.done(y), SinkDequantize)

    assert (miss.code, miss.at) == (MissCode.ARGUMENT, y)
    assert op.overloadpacket.__name__ in miss.reason
