"""Strategies of quantization specs and of what goes with them."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from tests.support.strategies.mx import KINDS, mx_specs

from qfuse.ir.ops.epilogue import (
    ACTIVATIONS,
    Act,
    Add,
    Cast,
    Epilogue,
    Glu,
    GluOrder,
    Mul,
    Prelu,
    Round,
)
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.element import Element
from qfuse.ir.quant.spec import (
    STORAGE_DTYPES,
    Arithmetic,
    Block,
    QuantSpec,
    ZeroPointDomain,
    dtype_range,
    stored_range,
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Draws the data of an example, so that hypothesis can repeat it.
SEEDS = st.integers(0, 2**32 - 1)
_SIZES = st.sampled_from([1, 2, 3, 4, 5, 7, 9])


def shapes(least: int = 0, most: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of small tensors; one in a few has an empty axis."""
    size = st.one_of(_SIZES, _SIZES, _SIZES, st.just(0))
    return st.lists(size, min_size=least, max_size=most).map(tuple)


def blocks(rank: int) -> st.SearchStrategy[Block]:
    """Blocks of a rank, most of which do not divide a size."""
    axis = st.one_of(st.none(), st.just(1), st.integers(2, 6))
    return st.lists(axis, min_size=rank, max_size=rank).map(tuple)


def ranges(dtype: torch.dtype) -> st.SearchStrategy[tuple[int, int]]:
    """Ranges within a storage type: the whole one, usual narrow ones, and any."""
    low, high = dtype_range(dtype)
    usual = [(low, high), (low + 1, high), (max(low, -8), 7), (0, min(high, 15)), (low, low)]
    anything = st.tuples(st.integers(low, high), st.integers(low, high)).map(sorted)
    return st.one_of(st.sampled_from(usual), anything.map(lambda pair: (pair[0], pair[1])))


def arithmetics() -> st.SearchStrategy[Arithmetic]:
    """Every order and precision that a spec can name."""
    compute = st.sampled_from((*FLOATS, torch.float64))
    return st.builds(Arithmetic, compute, st.booleans(), st.booleans())


@st.composite
def quant_specs(draw: st.DrawFn, rank: int | None = None) -> QuantSpec:
    """Any spec that can be written down."""
    dtype = draw(st.sampled_from(STORAGE_DTYPES))
    low, high = draw(ranges(dtype))
    return QuantSpec(
        dtype,
        low,
        high,
        draw(blocks(draw(st.integers(0, 4)) if rank is None else rank)),
        draw(st.sampled_from((*FLOATS, torch.float64))),
        draw(arithmetics()),
        draw(st.sampled_from(ZeroPointDomain)),
    )


@st.composite
def any_specs(draw: st.DrawFn) -> QuantSpec:
    """Any spec, also with scales in a format of their own and of two levels."""
    if draw(st.booleans()):
        return draw(quant_specs())
    rank = draw(st.integers(0, 4))
    outer = draw(st.none() | blocks(rank))
    return draw(mx_specs(draw(blocks(rank)), draw(st.sampled_from(FLOATS)), outer))


@st.composite
def choose_specs(draw: st.DrawFn) -> ChooseSpec:
    """Any choose spec that can be written down."""
    formula = draw(st.sampled_from(Formula))
    if draw(st.integers(0, 3)) == 3:
        dtype, element = draw(st.sampled_from(KINDS))
        low, high = stored_range(dtype, element)
    else:
        dtype = draw(st.sampled_from((torch.int8, torch.uint8, torch.int16, torch.int32)))
        element = Element.WHOLE
        low, high = draw(ranges(dtype))
    return ChooseSpec(
        formula,
        dtype,
        low,
        high,
        draw(blocks(draw(st.integers(0, 4)))),
        draw(st.floats(0, 1, allow_nan=False)),
        draw(st.sampled_from((torch.float32, torch.float64, torch.bfloat16))),
        draw(st.sampled_from((torch.int8, torch.uint8, torch.int32, torch.int64))),
        element,
        formula is Formula.NVFP4 and draw(st.booleans()),
    )


def epilogues() -> st.SearchStrategy[Epilogue]:
    """Any epilogue that can be written down."""
    number, index = st.floats(allow_nan=False), st.integers(0, 99)
    act = st.builds(
        Act, st.sampled_from(sorted(ACTIVATIONS)), st.lists(number, max_size=2).map(tuple)
    )
    rounded = st.builds(Round, index, st.none() | index, quant_specs())
    step = st.one_of(
        act,
        st.builds(Add, index, number),
        st.builds(Mul, index, st.none() | rounded),
        st.builds(Prelu, index),
        st.builds(Cast, st.sampled_from(FLOATS)),
        st.builds(Glu, act, st.sampled_from(GluOrder)),
        rounded,
    )
    return st.builds(Epilogue, st.lists(step, max_size=6).map(tuple))
