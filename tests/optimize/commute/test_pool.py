from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.propagate import Graph, applied, only_miss, priced, spec_of, steps

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.ir.quant.spec import QuantSpec
from qfuse.optimize.commute.pool import Pool
from qfuse.optimize.propagate.sink_dequantize import SinkDequantize
from qfuse.optimize.schedule import move

aten = torch.ops.aten


def dequantized(g: Graph, q: Any, *block: int | None, dtype: torch.dtype = torch.int8) -> Any:
    """A dequantize of quantized values."""
    spec = spec_of(*block, dtype=dtype)
    return g.dequantize(q, spec, g.params(q, spec))


@pytest.mark.numeric
def test_golden_stored_numbers_are_pooled() -> None:
    g = Graph(1)
    x = dequantized(g, g.stored(2, 3, 8, 8), None, 1, None, None)
    program = g.done(g.call(aten.max_pool2d.default, x, [3, 3], [2, 2], [1, 1]))

    assert applied(program, SinkDequantize).fired == {"sink-dequantize": 1}
    assert steps(program) == [
        *("max_pool2d[2, 3, 4, 4]", "dequantize[2, 3, 4, 4]", "neg[2, 3, 4, 4]"),
    ]
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[1]
%q1: int8[2, 3, 8, 8]
const %scale2: float32[1, 3, 1, 1]
const %zero3: int32[1, 3, 1, 1]
%0 = aten.max_pool2d(%q1, (3, 3), (2, 2), (1, 1), (1, 1), False): int8[2, 3, 4, 4]
%1 = qfuse.dequantize(%0, %scale2, %zero3, 'int8[-128,127] *x1x*x* float32 float32:reciprocal:round-zp int'): float32[2, 3, 4, 4]
%2 = aten.neg(%1): float32[2, 3, 4, 4]
return (%2)""",
    )


POOLS: dict[str, tuple[Any, tuple[int, ...], tuple[Any, ...]]] = {
    "1d": (aten.max_pool1d.default, (2, 3, 16), ([3], [2], [1])),
    "1d without a batch": (aten.max_pool1d.default, (3, 16), ([2],)),
    "1d apart": (aten.max_pool1d.default, (2, 3, 16), ([3], [1], [1], [2])),
    "1d to the end": (aten.max_pool1d.default, (2, 3, 15), ([4], [4], [1], [1], True)),
    "2d": (aten.max_pool2d.default, (2, 3, 8, 8), ([2, 2],)),
    "2d without a batch": (aten.max_pool2d.default, (3, 8, 8), ([2], [1], [1])),
    "2d of two kinds": (aten.max_pool2d.default, (2, 3, 9, 8), ([3, 2], [1, 2], [1, 0])),
    "2d apart": (aten.max_pool2d.default, (2, 3, 9, 9), ([2, 2], [1, 1], [1, 1], [2, 3])),
    "2d to the end": (
        aten.max_pool2d.default,
        (1, 2, 7, 7),
        ([2, 2], [2, 2], [0, 0], [1, 1], True),
    ),
    "3d": (aten.max_pool3d.default, (1, 2, 6, 6, 6), ([2, 2, 2], [2, 2, 2], [1, 1, 1])),
    "amax": (aten.amax.default, (2, 3, 8), ([1],)),
    "amax of some": (aten.amax.default, (2, 3, 8), ([-1, 0], True)),
    "amax of all": (aten.amax.default, (2, 3, 8), ()),
    "amin": (aten.amin.default, (2, 3, 8), ([2],)),
}


@pytest.mark.numeric
@pytest.mark.parametrize("name", list(POOLS))
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16], ids=str)
@pytest.mark.parametrize("float_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_greatest_stored_number_is_the_greatest(
    name: str, dtype: torch.dtype, float_dtype: torch.dtype
) -> None:
    op, shape, args = POOLS[name]
    g = Graph(1)
    q = g.b.arg("q", dtype, *shape)
    spec = spec_of(*(None,) * len(shape), dtype=dtype, float_dtype=float_dtype)
    program = g.done(g.call(op, g.dequantize(q, spec, g.params(q, spec)), *args))

    assert applied(program, SinkDequantize).fired == {"sink-dequantize": 1}


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("op", "shape"),
    [
        (aten.max_pool2d_with_indices.default, (1, 2, 8, 8)),
        (aten.max_pool3d_with_indices.default, (1, 2, 4, 4, 4)),
    ],
    ids=str,
)
def test_indices_that_nobody_reads(op: Any, shape: tuple[int, ...]) -> None:
    g = Graph(1)
    x = dequantized(g, g.stored(*shape), *(None,) * len(shape))
    pooled = g.call(op, x, [2] * (len(shape) - 2))
    program = g.done(g.b.item(pooled, 0))

    assert applied(program, SinkDequantize).fired == {"sink-dequantize": 1}
    assert "with_indices" not in " ".join(steps(program))


@pytest.mark.numeric
@pytest.mark.parametrize("b", [1, 3])
def test_a_batch_of_any_size(b: int) -> None:
    g = Graph("b", 2, 8, 8)
    spec = spec_of(None, 1, None, None)
    params = g.params(g.b.arg("like", torch.float32, 1, 2, 8, 8), spec)
    x = g.dequantize(g.quantize(g.x, spec, params), spec, params)
    program = g.done(g.call(aten.max_pool2d.default, x, [3, 3], [2, 2], [1, 1]))

    assert applied(program, SinkDequantize, b=b).fired == {"sink-dequantize": 1}


@pytest.mark.numeric
def test_between_equal_quantizes_only_stored_numbers_are_left() -> None:
    g = Graph(1, 2, 8, 8)
    spec = spec_of(None, None, None, None)
    params = g.params(g.x, spec)
    x = g.dequantize(g.quantize(g.x, spec, params), spec, params)
    y = g.call(aten.max_pool2d.default, x, [2, 2])
    program = g.done(g.dequantize(g.quantize(y, spec, params), spec, params))

    move(program, priced())
    assert [step.partition("[")[0] for step in steps(program)] == [
        *("quantize", "max_pool2d", "dequantize", "neg"),
    ]


@pytest.mark.parametrize("axis", [2, 3])
def test_refuses_windows_over_several_blocks(axis: int) -> None:
    g = Graph(1)
    block: list[int | None] = [None] * 4
    block[axis] = 1
    y = g.call(aten.max_pool2d.default, dequantized(g, g.stored(1, 2, 8, 8), *block), [2, 2])

    miss = only_miss(g.done(y), SinkDequantize)
    assert (miss.code, miss.at) == (MissCode.GRANULARITY, y)
    assert f"axis {axis}" in miss.reason


def test_refuses_a_window_of_nothing_but_padding() -> None:
    g = Graph(1)
    x = dequantized(g, g.stored(1, 2, 1), None, None, None)
    y = g.call(aten.max_pool1d.default, x, [2], [1], [1], [2])
    program = g.done(y)

    miss = only_miss(program, SinkDequantize)
    assert (miss.code, miss.at) == (MissCode.SHAPE, y)
    assert "padding" in miss.reason


@pytest.mark.parametrize(
    ("size", "args", "full"),
    [
        (8, ([2],), True),
        (8, ([3], [2], [1]), True),
        (1, ([2], [1], [1], [2]), False),
        (3, ([2], [1], [1], [2]), True),
        (5, ([2], [3], [1], [1], True), True),
    ],
    ids=str,
)
def test_windows_of_padding_are_those_whose_greatest_is_infinite(
    size: int, args: tuple[Any, ...], full: bool
) -> None:
    g = Graph(1, size)
    pool = Pool.of(g.call(aten.max_pool1d.default, g.x, *args))
    assert isinstance(pool, Pool)
    assert pool.never_empty() is full
    assert bool(aten.max_pool1d.default(torch.zeros(1, size), *args).isfinite().all()) is full


def of_unknown_size(*args: Any) -> tuple[Graph, Any]:
    """A pool of an image of unknown height."""
    g = Graph("b", 2, "h", 8)
    spec = spec_of(None, None, None, None)
    params = g.params(g.b.arg("like", torch.float32, 1, 2, 8, 8), spec)
    x = g.dequantize(g.quantize(g.x, spec, params), spec, params)
    return g, g.call(aten.max_pool2d.default, x, *args)


@pytest.mark.numeric
@pytest.mark.parametrize("h", [3, 7, 8])
@pytest.mark.parametrize(
    "args",
    [
        ([2, 2], [2, 2], [1, 0]),
        ([3, 3], [2, 2], [1, 1]),
        ([2, 2], [2, 2], [0, 0], [1, 1], True),
        ([3, 3], [2, 2], [1, 1], [1, 1], True),
        ([2, 2], [1, 1], [0, 0], [2, 2]),
    ],
    ids=str,
)
def test_sizes_need_not_be_known_where_every_window_reaches_an_element(
    args: tuple[Any, ...], h: int
) -> None:
    g, y = of_unknown_size(*args)

    assert applied(g.done(y), SinkDequantize, b=2, h=h).fired == {"sink-dequantize": 1}


def test_refuses_windows_that_may_step_over_an_axis_of_unknown_size() -> None:
    g, y = of_unknown_size([2, 2], [1, 1], [1, 1], [2, 2])

    assert only_miss(g.done(y), SinkDequantize, b=2, h=7).code is MissCode.SHAPE


WINDOWS = [
    (size, stride, pad, dilation, ceil)
    for size, stride, pad, dilation, ceil in itertools.product(
        (1, 2, 3), (1, 2, 3, 5), (0, 1), (1, 2), (False, True)
    )
    # torch allows no more.
    if pad <= size // 2
]


@pytest.mark.numeric
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows_of_an_unknown_axis_hold_elements_for_every_size(window: tuple[Any, ...]) -> None:
    size, stride, pad, dilation, ceil = window
    args = [size], [stride], [pad], [dilation], ceil
    g = Graph(1, 1, "s")
    pool = Pool.of(g.call(aten.max_pool1d.default, g.x, *args))
    assert isinstance(pool, Pool)

    assert pool.never_empty() is (pad == 0 or dilation == 1)
    for count in range(max(1, dilation * (size - 1) + 1 - 2 * pad), 12):
        finite = aten.max_pool1d.default(torch.zeros(1, 1, count), *args).isfinite().all()
        assert bool(finite) or not pool.never_empty()


def test_refuses_indices_that_are_read() -> None:
    g = Graph(1)
    x = dequantized(g, g.stored(1, 2, 8, 8), *(None,) * 4)
    y = g.call(aten.max_pool2d_with_indices.default, x, [2, 2])
    program = g.done(g.b.item(y, 0), g.b.item(y, 1))

    miss = only_miss(program, SinkDequantize)
    assert (miss.code, miss.at) == (MissCode.SHARED, y)


def test_refuses_a_dequantize_that_something_else_reads() -> None:
    g = Graph(1)
    x = dequantized(g, g.stored(2, 8), None, None)
    program = g.done(g.call(aten.amax.default, x, [1]), x)

    miss = only_miss(program, SinkDequantize)
    assert (miss.code, miss.at) == (MissCode.SHARED, x)


def test_refuses_parameters_of_run_time() -> None:
    g = Graph(2, 8)
    spec = spec_of(None, None)
    params = g.choose(g.x, (None, None))
    x = g.dequantize(g.quantize(g.x, spec, params), spec, params)

    miss = only_miss(g.done(g.call(aten.amax.default, x, [1])), SinkDequantize)
    assert (miss.code, miss.at) == (MissCode.NOT_CONSTANT, params[0])


@pytest.mark.parametrize("scale", [-0.1, float("nan"), float("inf")])
def test_refuses_scales_that_keep_no_order(scale: float) -> None:
    g = Graph(1)
    q = g.stored(2, 8)
    spec = spec_of(None, None)
    y = g.call(aten.amax.default, g.dequantize(q, spec, g.params(q, spec, scale)), [1])

    assert only_miss(g.done(y), SinkDequantize).code is MissCode.RANGE


def test_refuses_float_storage() -> None:
    g = Graph(1)
    q = g.b.arg("q", torch.float8_e4m3fn, 2, 8)
    spec = QuantSpec(torch.float8_e4m3fn, -448, 448, (None, None))
    scale = g.constant(torch.full((1, 1), 0.1), "scale")
    y = g.call(aten.amax.default, g.dequantize(q, spec, (scale, None)), [1])

    assert only_miss(g.done(y), SinkDequantize).code is MissCode.DTYPE


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_channels_last_images_may_have_more_positions_than_values_count(dtype: torch.dtype) -> None:
    """torch's own 8-bit pool raises for them."""
    g = Graph(1)
    q = g.b.arg("q", dtype, 1, 3, 20, 20, order=(0, 2, 3, 1))
    x = dequantized(g, q, None, None, None, None, dtype=dtype)
    program = g.done(g.call(aten.max_pool2d.default, x, [3, 3], [2, 2], [1, 1]))

    assert applied(program, SinkDequantize).fired == {"sink-dequantize": 1}
    (pooled,) = program.graph.find_nodes(op="call_function", target=aten.max_pool2d.default)
    assert pooled.meta["val"].dtype is torch.int32
