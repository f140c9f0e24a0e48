from __future__ import annotations

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from torch.fx import Node

from qfuse.ir.graph.stage_graph import CapturedGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.value_range import bounds_of, is_zero
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import run

aten = torch.ops.aten
INT32 = (-(2**31), 2**31 - 1)


def zero_point(formula: Formula, dtype: torch.dtype, low: int, high: int, to: torch.dtype) -> Node:
    """The zero point that a formula chooses for the rows of an input."""
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4, 8)
    spec = ChooseSpec(formula, dtype, low, high, (1, None), 1e-5, torch.float32, to)
    return b.item(b.call(ops.choose_qparams, x, str(spec)), 1)


@pytest.mark.parametrize(
    ("formula", "dtype", "codes", "to", "bounds"),
    [
        (Formula.TOKEN_ASYMMETRIC, torch.int8, (-128, 127), torch.int32, (-128, 127)),
        (Formula.AO_ASYMMETRIC, torch.uint8, (0, 200), torch.int64, (0, 200)),
        # Of a tensor without elements the zero point is zero, whatever the range is.
        (Formula.AO_ASYMMETRIC, torch.uint8, (3, 200), torch.int64, (0, 200)),
        # These choose the same whatever the range is.
        (Formula.DECOMPOSED_SYMMETRIC, torch.uint8, (0, 100), torch.int64, (0, 128)),
        (Formula.TOKEN_SYMMETRIC, torch.int8, (-128, 127), torch.int32, (0, 0)),
        # It wraps.
        (Formula.AO_ASYMMETRIC, torch.uint8, (0, 255), torch.int8, (-128, 127)),
    ],
)
def test_a_chosen_zero_point_lies_in_the_range_that_it_was_chosen_for(
    formula: Formula,
    dtype: torch.dtype,
    codes: tuple[int, int],
    to: torch.dtype,
    bounds: tuple[int, int],
) -> None:
    assert bounds_of(zero_point(formula, dtype, *codes, to)) == bounds


def test_nothing_is_known_of_what_may_be_a_fraction() -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4)
    clamped = b.call(aten.clamp.default, x, -8, 7)

    assert bounds_of(x) is None
    assert bounds_of(clamped) is None
    assert bounds_of(b.call(aten.round.default, clamped)) == (-8, 7)
    assert bounds_of(b.call(aten.clamp.default, b.call(aten.round.default, x), -8, 7.5)) is None
    assert bounds_of(b.call(aten._to_copy.default, x, dtype=torch.int32)) == INT32
    assert bounds_of(b.call(aten._to_copy.default, x, dtype=torch.bool)) is None


def test_the_type_alone_costs_nothing_and_says_less() -> None:
    b = GraphBuilder()
    zero = b.const("zero", torch.tensor([3, 9], dtype=torch.int32))

    assert bounds_of(zero) == (3, 9)
    assert bounds_of(zero, look=False) == INT32


TYPES = (
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
    *(torch.float32, torch.float16, torch.bfloat16),
)
# One step, applied to integers or floats; each keeps the type or names another.
STEPS = st.one_of(
    st.tuples(st.just(aten.clamp.default), st.integers(-300, 300), st.integers(-300, 300)),
    st.tuples(st.just(aten.clamp.default), st.none(), st.integers(-300, 300)),
    st.tuples(st.just(aten.clamp_min.default), st.floats(-300, 300)),
    st.tuples(st.just(aten.clamp_max.default), st.integers(-300, 300)),
    st.tuples(st.just(aten.add.Tensor), st.integers(-300, 300)),
    st.tuples(st.just(aten.sub.Tensor), st.integers(-300, 300)),
    st.tuples(st.just(aten.view.default), st.just((2, -1))),
    st.sampled_from(TYPES).map(lambda dtype: (aten._to_copy.default, dtype)),
    st.sampled_from([aten.round.default, aten.floor.default, aten.ceil.default]).map(
        lambda op: (op,)
    ),
)


# Torch takes no number that the integers it is combined with cannot hold; 2.15 says so of clamps.
UNHELD = ("without overflow", "outside the representable range")


def grown(b: GraphBuilder, node: Node, steps: list[tuple[object, ...]]) -> Node:
    """Call the steps one after the other; rounding is for floats alone."""
    for op, *rest in steps:
        if op is aten._to_copy.default:
            node = b.call(op, node, dtype=rest[0])  # type: ignore[arg-type]
        elif rest or node.meta["val"].is_floating_point():
            node = b.call(op, node, *rest)  # type: ignore[arg-type]
    return node


@pytest.mark.property
@given(st.lists(STEPS, max_size=6), st.sampled_from([torch.float32, torch.int32, torch.uint8]))
def test_every_element_lies_in_the_bounds(
    steps: list[tuple[object, ...]], dtype: torch.dtype
) -> None:
    b = GraphBuilder()
    try:
        node = grown(b, b.arg("x", dtype, 2, 64), steps)
    except RuntimeError as error:
        if not any(text in str(error) for text in UNHELD):
            raise
        reject()
    bounds = bounds_of(node)
    program = b.done(node, stage=CapturedGraph)
    if bounds is None:
        return
    # Floats out of the range of an integer type are converted to anything, so they stay in it.
    x = torch.randn(2, 64) * torch.tensor([1.0, 100.0])[:, None]
    try:
        (y,) = run(program, [x.to(torch.int32).to(dtype) if dtype != torch.float32 else x])
    except RuntimeError as error:
        if not any(text in str(error) for text in UNHELD):
            raise
        reject()
    assert bounds[0] <= y.min().item() <= y.max().item() <= bounds[1]
    assert torch.equal(y.double(), y.double().round())


@pytest.mark.parametrize(
    ("fill", "expected"), [(0.0, True), (0, True), (-0.0, False), (1.0, False)]
)
def test_a_negative_zero_is_not_zero(fill: float, expected: bool) -> None:
    b = GraphBuilder()
    x = b.arg("x", torch.float32, 4)

    assert is_zero(b.call(aten.full_like.default, x, fill)) is expected
    constant = b.const("c", torch.full((2,), fill, dtype=torch.float32))
    assert is_zero(constant) is expected


MANY = (1 << 22) + 1  # too many to be computed at compile time


@pytest.mark.parametrize(
    ("args", "dtype", "expected"),
    [
        ((MANY,), torch.int64, (0, MANY - 1)), ((3, MANY), torch.int32, (3, MANY - 1)),
        ((-9, MANY), torch.int64, (-9, MANY - 1)), ((MANY,), torch.float32, (0, MANY - 1)),
        # They wrap.
        ((MANY,), torch.int16, (-(1 << 15), (1 << 15) - 1)),
    ],
)  # fmt: skip
def test_positions_lie_between_their_ends(
    args: tuple[int, ...], dtype: torch.dtype, expected: tuple[int, int]
) -> None:
    b = GraphBuilder()
    op = aten.arange.default if len(args) == 1 else aten.arange.start
    assert bounds_of(b.call(op, *args, dtype=dtype)) == expected


@pytest.mark.parametrize(
    ("dtype", "least"), [(torch.int64, 0), (torch.int32, 0), (torch.int8, -128)]
)
def test_positions_of_a_dynamic_size_have_a_start(dtype: torch.dtype, least: int) -> None:
    b = GraphBuilder()
    count = b.call(aten.sym_size.int, b.arg("x", torch.float32, "n"), 0)
    bounds = bounds_of(b.call(aten.arange.default, count, dtype=dtype))
    assert bounds is not None
    assert bounds[0] == least
