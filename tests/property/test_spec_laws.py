"""Blocks, grids and granularities, against counting element by element."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.support.strategies.quant_specs import choose_specs, quant_specs, shapes

from qfuse.ir.errors import BlockError
from qfuse.ir.quant.choose import ChooseSpec
from qfuse.ir.quant.spec import Block, Granularity, QuantSpec

pytestmark = pytest.mark.property


def owners(shape: tuple[int, ...], block: Block) -> dict[tuple[int, ...], tuple[int, ...]]:
    """For every element of a tensor, the block that it lies in."""
    return {
        index: tuple(0 if b is None else i // b for i, b in zip(index, block, strict=True))
        for index in itertools.product(*map(range, shape))
    }


@given(st.data(), shapes())
def test_the_grid_has_one_entry_per_block(data: st.DataObject, shape: tuple[int, ...]) -> None:
    spec = data.draw(quant_specs(len(shape)))
    grid = spec.grid(shape)
    blocks = set(owners(shape, spec.block).values())
    if blocks:
        assert blocks == set(itertools.product(*[range(int(n)) for n in grid]))
    for axis, size in enumerate(shape):
        if size == 0:
            assert grid[axis] == (1 if spec.block[axis] is None else 0)


@given(st.data(), shapes(), shapes())
def test_a_scale_fits_exactly_if_it_has_the_shape_of_the_grid(
    data: st.DataObject, shape: tuple[int, ...], other: tuple[int, ...]
) -> None:
    spec = data.draw(quant_specs(len(shape)))
    grid = spec.grid(shape)
    spec.check(shape, grid)
    assume(other != grid)
    with pytest.raises(BlockError, match="does not fit"):
        spec.check(shape, other)


@given(quant_specs(), shapes())
def test_another_rank_is_refused(spec: QuantSpec, shape: tuple[int, ...]) -> None:
    assume(len(shape) != spec.rank)
    with pytest.raises(BlockError, match="another rank"):
        spec.grid(shape)


@given(choose_specs(), st.data())
def test_choosing_has_the_grid_of_quantizing(choose: ChooseSpec, data: st.DataObject) -> None:
    rank = len(choose.block)
    shape = data.draw(shapes(rank, rank))
    spec = QuantSpec(choose.dtype, choose.quant_min, choose.quant_max, choose.block)
    assert choose.grid(shape) == spec.grid(shape)


@given(st.data(), shapes())
def test_granularity_is_what_the_elements_share(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    spec = data.draw(quant_specs(len(shape)))
    name = spec.granularity(shape)
    grid = [int(n) for n in spec.grid(shape)]
    split = [axis for axis, n in enumerate(grid) if n != 1]
    grouped = [axis for axis in split if spec.block[axis] != 1]
    assert (name is Granularity.PER_TENSOR) == (math.prod(grid) == 1)
    if name is Granularity.PER_GROUP:
        assert len(grouped) == 1
    if name in {Granularity.PER_CHANNEL, Granularity.PER_TOKEN}:
        assert split, "there are several scales"
        assert not grouped, "each index has a scale of its own"
    if name is Granularity.PER_TOKEN:
        assert split[-1] != len(shape) - 1, "the last axis is whole"


@given(st.data(), shapes(least=1))
def test_granularity_does_not_depend_on_how_a_whole_axis_is_written(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    assume(all(shape))
    spec = data.draw(quant_specs(len(shape)))
    spelled = [
        size + data.draw(st.integers(0, 3)) if b is None else b
        for size, b in zip(shape, spec.block, strict=True)
    ]
    assert spec.with_block(spelled).granularity(shape) is spec.granularity(shape)
