from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from tests.lower.problems.test_linear_rowwise import REFUSED, TAKEN, assert_same_values
from tests.support.cases.linear_rowwise import LinearRowwiseCase
from tests.support.cases.linear_rowwise import lowered as lower_pair
from tests.support.cases.lowering import NO_KERNELS, lowered, pairs, the_kernel, why_not

from qfuse.ir.events import Exactness, Lowered
from qfuse.ir.graph.stage_graph import LoweredGraph, NormalGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.quant.spec import Arithmetic, QuantSpec, ZeroPointDomain
from qfuse.rewrite.compare import compare
from qfuse.rewrite.tolerance import SITE
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import QuantizedLinear, per_tensor, per_token

aten = torch.ops.aten
FOUR, EIGHT = "qfuse.linear_w4a8", "qfuse.linear_w8a8_grouped"
pytestmark = pytest.mark.own_kernels


def int4(block: tuple[int | None, int | None] = (1, 32), **changes: object) -> QuantSpec:
    """A weight of four bits in bytes."""
    return replace(QuantSpec(torch.int8, -8, 7, block), **changes)  # type: ignore[arg-type]


def int8(block: tuple[int | None, int | None] = (1, 32)) -> QuantSpec:
    """A weight of eight bits."""
    return QuantSpec(torch.int8, -128, 127, block)


def right(program: NormalGraph, **sizes: int) -> str:
    """Lower ``program``, compare all values, and return the kernel of its only linear."""
    low = lowered(program)
    for new, old in pairs(program, low, **sizes):
        assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None
    return the_kernel(low)


def weighted(
    weight: QuantSpec,
    stored: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
    *,
    k: int = 64,
    x_spec: QuantSpec | None = None,
) -> NormalGraph:
    """A linear ``[m, k] -> [m, 40]`` whose weight has these numbers and zero points."""
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "m", k)
    block = QuantizedLinear(b, 40, k, weight=weight)
    if stored is None:
        stored = torch.randint(weight.quant_min, weight.quant_max + 1, (40, k)).to(weight.dtype)
    scale = b.const("w_scale", torch.rand([int(g) for g in weight.grid((40, k))]) * 0.01 + 1e-3)
    node = None if zero is None else b.const("w_zero", zero)
    w = b.call(ops.dequantize, b.const("w", stored), scale, node, str(weight))
    real = block.quantized(x, x_spec or per_tensor(2))
    return b.done(b.call(aten.linear.default, real, w))


@pytest.mark.numeric
@pytest.mark.parametrize("block", [(1, 32), (1, 64), (1, 8), (None, 32), (16, 32), (3, 16)])
@pytest.mark.parametrize("m", [1, 33])
def test_values_of_groups(block: tuple[int | None, int], m: int) -> None:
    assert right(weighted(int4(block)), m=m) == FOUR
    whole = block[1] == 64
    expected = "qfuse.linear_w8a8" if whole and block[0] == 1 else EIGHT
    assert right(weighted(int8(block)), m=m) == expected


@pytest.mark.numeric
@pytest.mark.parametrize("block", [(1, None), (None, None), (1, 24)])
@pytest.mark.parametrize("k", [24, 13])
def test_values_of_four_bits_without_groups(block: tuple[int | None, int | None], k: int) -> None:
    assert right(weighted(int4(block), k=k), m=3) == FOUR


@pytest.mark.numeric
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize(
    ("weight", "kernel"),
    [
        (int4(), FOUR),
        (QuantSpec(torch.uint8, 0, 15, (1, 32)), FOUR),
        (QuantSpec(torch.int32, -8, 7, (1, 32)), FOUR),
        (QuantSpec(torch.int8, -7, 7, (1, 32)), FOUR),
        (int8(), EIGHT),
        (QuantSpec(torch.uint8, 0, 255, (1, 32)), EIGHT),
    ],
    ids=str,
)
def test_values_of_weights_with_zero_points(weight: QuantSpec, kernel: str, *, each: bool) -> None:
    low, high = weight.quant_min, weight.quant_max + 1
    zero = torch.randint(low, high, (40, 2)) if each else torch.full((40, 2), low + 3)
    for x_spec in (per_tensor(2), per_tensor(2, torch.uint8)):
        assert right(weighted(weight, zero=zero, x_spec=x_spec), m=5) == kernel


@pytest.mark.numeric
def test_numbers_that_fit_four_bits_are_four_bits_whatever_their_range() -> None:
    narrow = torch.randint(50, 66, (40, 64)).to(torch.int8)
    assert right(weighted(int8(), narrow, torch.full((40, 2), 60)), m=4) == FOUR
    # The other way: dequantize does not clamp, so numbers beyond the range are what they are.
    beyond = torch.randint(-8, 8, (40, 64)).to(torch.int8)
    beyond[3, 5] = 8
    assert right(weighted(int4(), beyond), m=4) == EIGHT


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("float_dtype", [torch.float32, torch.bfloat16])
def test_one_scale_per_row_at_every_rank(
    rank: int, asymmetric: bool, float_dtype: torch.dtype
) -> None:
    b = GraphBuilder()
    shape = [3, 1, 2][: rank - 1]
    x = b.arg("x", float_dtype, *shape, 64)
    spec = per_token(rank, float_dtype=float_dtype)
    grid = [int(g) for g in spec.grid((*shape, 64))]
    scale = b.const("scale", torch.rand(grid) * 0.02 + 1e-3)
    zero = b.const("zero", torch.randint(-20, 20, grid).to(torch.int8)) if asymmetric else None
    q = b.call(ops.quantize, x, scale, zero, str(spec))
    dequantized = b.call(ops.dequantize, q, scale, zero, str(spec))
    block = QuantizedLinear(b, 40, 64, bias=False, weight=int4(float_dtype=float_dtype))

    assert right(b.done(block.linear(dequantized))) == FOUR


@pytest.mark.numeric
@pytest.mark.parametrize(("weight", "kernel"), [(int4(), FOUR), (int8(), EIGHT)], ids=str)
def test_epilogue_and_quantized_output_are_in_the_kernel(weight: QuantSpec, kernel: str) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, "m", 64)
    residual = b.arg("r", torch.float32, "m", 40)
    block = QuantizedLinear(b, 40, 64, weight=weight)
    y = block.linear(block.quantized(x, per_tensor(2)))
    y = b.call(aten.add.Tensor, b.call(aten.gelu.default, y), residual)
    spec = replace(per_tensor(2, torch.uint8), quant_min=3, quant_max=200)
    q, _, _ = QuantizedLinear(b, 1, 1).stored(y, spec, "out")
    program = b.done(q)
    low = lowered(program)

    calls = [n.target for n in low.graph.nodes if n.op == "call_function"]
    assert str(calls[-1]) == f"{kernel}_quantized.default"
    assert aten.gelu.default not in calls
    for new, old in pairs(program, low, m=50):
        assert compare(new, old, None, Exactness.ROUNDING, SITE).wrong is None


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("weight", "kernel"), [(int4((1, 8)), FOUR), (int8((1, 8)), EIGHT)], ids=str
)
@pytest.mark.parametrize("name", TAKEN)
def test_what_is_behind_is_in_the_kernel(name: str, weight: QuantSpec, kernel: str) -> None:
    case = replace(TAKEN[name], weight=weight, k=40)
    program = case.program()
    low = lower_pair(program)
    (event,) = low.log.of(Lowered)

    assert (event.kernel, event.place.op) == (kernel, "qfuse.linear")
    assert_same_values(program, low, narrow=case.float_dtype is torch.bfloat16)


@pytest.mark.parametrize(
    ("weight", "kernel"), [(int4((1, 8)), FOUR), (int8((1, 8)), EIGHT)], ids=str
)
def test_codes_of_rows_are_one_call(weight: QuantSpec, kernel: str) -> None:
    low = lower_pair(LinearRowwiseCase(weight=weight, k=40).program())
    calls = [str(n.target) for n in low.graph.nodes if n.op == "call_function"]
    assert calls.count(f"{kernel}_rows.default") == 1
    # Each of the halves of 70 features begins with a block of its own.
    assert low.module.get_buffer("w_packed").shape[0] == 4
    refused = lower_pair(
        replace(REFUSED["its result is stored as int16"], weight=weight, k=40).program()
    )
    (rows,) = [e for e in refused.log.of(Lowered) if e.place.op == "qfuse.activation"]
    assert "its result is stored as int16" in dict(rows.losers)[f"{kernel} with the linear"]


def test_what_is_emitted() -> None:
    low = lowered(weighted(int4(), zero=torch.zeros(40, 2, dtype=torch.int64)))
    (call,) = [n for n in low.graph.nodes if str(n.target) == f"{FOUR}.default"]
    constants = {
        n.target: tuple(low.module.get_buffer(n.target).shape)
        for n in low.graph.nodes
        if n.op == "get_attr"
    }

    assert {k: v for k, v in constants.items() if k.startswith("w")} == {
        "w_packed": (1, 8, 64, 4),
        "w_sums": (1, 2, 64),
        "w_scales": (1, 2, 64),
        "w_zeros": (1,),
    }
    assert low.module.get_buffer("w_sums").dtype is torch.int16
    assert low.module.get_buffer("w_zeros").tolist() == [8]
    assert call.args[7:] == (40, None, None, "", torch.float32, torch.float32)


def test_a_weight_read_by_two_linears_is_packed_once() -> None:
    b = GraphBuilder()
    block = QuantizedLinear(b, 40, 64, weight=int4())
    weight = block.weight_node()
    results = []
    for name in ("x", "z"):
        x = block.quantized(b.arg(name, torch.float32, "m", 64), per_tensor(2), name)
        results.append(b.call(aten.linear.default, x, weight))
    low = lowered(b.done(*results))

    assert [e.kernel for e in low.log.of(Lowered)] == [FOUR, FOUR]
    packed = [n for n, t in low.module.named_buffers() if t.dtype is torch.uint8]
    assert len(packed) == 1


def test_four_bits_are_read_rather_than_eight() -> None:
    program = weighted(int4((1, None)))
    low = lowered(program)

    assert the_kernel(low) == FOUR
    assert "predicted" in why_not(low, "qfuse.linear_w8a8")


FOUR_REFUSES = [
    (int8(), "span more than 15"),
    (int4((1, 12)), "blocks of 1x12: groups must be whole"),
    (int4((1, 20)), "blocks of 1x20: groups must be whole"),
    (int4((1, 48)), "blocks of 1x48: groups must be whole"),
    (int4(arithmetic=Arithmetic(torch.float64)), "float64"),
    (QuantSpec(torch.float8_e4m3fn, -448, 448, (1, 32)), "stored as torch.float8_e4m3fn"),
]


@pytest.mark.parametrize(("weight", "reason"), FOUR_REFUSES, ids=str)
def test_refuses_weights_that_it_would_get_wrong(weight: QuantSpec, reason: str) -> None:
    stored = torch.randint(-8, 8, (40, 64)).to(weight.dtype)
    if "span" in reason:
        stored[7, 9] = 8
    low = lowered(weighted(weight, stored))

    assert the_kernel(low) in {"expand", EIGHT, "qfuse.linear_w8a16"}
    assert re.search(reason, why_not(low, FOUR))


@pytest.mark.parametrize("value", [-137, 120, 2**32, -(2**31)])
def test_refuses_a_zero_point_that_eight_bits_do_not_hold(value: int) -> None:
    zero = torch.zeros(40, 2, dtype=torch.int64)
    zero[5, 1] = value
    low = lowered(weighted(int4(), zero=zero))

    assert the_kernel(low) == "expand" or value == 120
    assert "a zero point too far from its values" in why_not(low, FOUR)


@pytest.mark.numeric
@pytest.mark.parametrize("value", [-136, 119])
def test_values_of_zero_points_at_the_ends(value: int) -> None:
    zero = torch.zeros(40, 2, dtype=torch.int64)
    zero[5, 1] = value
    assert right(weighted(int4(), zero=zero), m=3) == FOUR


def test_refuses_a_zero_point_that_is_a_real_offset() -> None:
    weight = int4(domain=ZeroPointDomain.FLOAT_OFFSET)
    low = lowered(weighted(weight, zero=torch.rand(40, 2)))

    assert the_kernel(low) == "qfuse.linear_w4a16"
    assert why_not(low, FOUR) == "the weight's zero point is a float offset"


def test_eight_bits_in_groups_refuse_what_others_take() -> None:
    whole = lowered(weighted(int8((1, None))))
    assert why_not(whole, EIGHT) == "the weight's scales are not grouped along its input features"
    wide = lowered(weighted(QuantSpec(torch.int16, -300, 300, (1, 32))))
    assert the_kernel(wide) == "expand"
    assert why_not(wide, EIGHT) == "the weight is stored as torch.int16"
    zero = torch.full((40, 2), 128)
    assert "outside [-128, 127]" in why_not(lowered(weighted(int8(), zero=zero)), EIGHT)


def test_refuses_float_activations() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, 64)
    low = lowered(b.done(QuantizedLinear(b, 48, 64, weight=int4()).linear(x)))
    assert why_not(low, FOUR) == why_not(low, EIGHT) == "the activation is not quantized"


def test_refuses_a_weight_computed_at_run_time() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 2, 64)
    stored = b.const("w", torch.zeros(40, 64, dtype=torch.int8))
    scale = b.arg("w_scale", torch.float32, 40, 2)
    w = b.call(ops.dequantize, stored, scale, None, str(int4()))
    real = QuantizedLinear(b, 40, 64).quantized(x, per_tensor(2))
    low = lowered(b.done(b.call(aten.linear.default, real, w)))

    expected = "the weight or its parameters are computed at run time"
    assert why_not(low, FOUR) == why_not(low, EIGHT) == expected


@pytest.mark.parametrize(("k", "taken"), [(1 << 15, True), ((1 << 15) + 8, False)])
def test_refuses_sums_that_32_bits_cannot_hold(k: int, taken: bool) -> None:
    low = lowered(weighted(int4((1, None)), k=k))

    assert (FOUR not in dict(the_losers(low))) is taken
    if not taken:
        assert "could overflow its sums" in why_not(low, FOUR)


def the_losers(low: LoweredGraph) -> tuple[tuple[str, str], ...]:
    """Who did not take the only linear, and why."""
    (event,) = low.log.of(Lowered)
    return event.losers


def test_refuses_when_there_is_no_library() -> None:
    low = lowered(weighted(int4()), NO_KERNELS)
    assert why_not(low, FOUR) == why_not(low, EIGHT) == "switched off by the test"
