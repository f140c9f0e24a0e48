from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qfuse.normalize.match.broadcast import Broadcast, block_of, broadcast_of, is_per_feature
from qfuse.testing.build import GraphBuilder

SHAPES = st.lists(st.integers(1, 3), max_size=4).map(tuple)


def broadcast(factor: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor | None:
    """Number the entries of a factor and spread them over ``shape``, if they fit in it."""
    numbers = torch.arange(torch.Size(factor).numel()).reshape(factor)
    try:
        return numbers.expand(shape)
    except RuntimeError:
        return None


@pytest.mark.property
@given(SHAPES, SHAPES.filter(bool))
def test_a_spread_is_what_broadcasting_does(
    factor: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    spread, numbers = broadcast_of(factor, shape), broadcast(factor, shape)
    if spread is None:
        return
    assert numbers is not None
    rows = numbers.reshape(-1, shape[-1])
    if spread is Broadcast.TENSOR:
        assert not rows.any()
    elif spread is Broadcast.CHANNEL:
        assert torch.equal(rows, torch.arange(shape[-1]).expand_as(rows))
    else:
        assert torch.equal(rows, torch.arange(len(rows))[:, None].expand_as(rows))


@pytest.mark.property
@given(SHAPES, SHAPES.filter(bool))
def test_every_spread_is_found(factor: tuple[int, ...], shape: tuple[int, ...]) -> None:
    numbers = broadcast(factor, shape)
    if broadcast_of(factor, shape) is not None or numbers is None:
        return
    rows = numbers.reshape(-1, shape[-1])
    assert not torch.equal(rows, torch.zeros_like(rows))
    assert not torch.equal(rows, torch.arange(shape[-1]).expand_as(rows))
    assert not torch.equal(rows, torch.arange(len(rows))[:, None].expand_as(rows))


@pytest.mark.property
@given(SHAPES, SHAPES)
def test_a_block_gives_its_grid_back(grid: tuple[int, ...], shape: tuple[int, ...]) -> None:
    block = block_of(shape, grid)
    if block is None:
        return
    assert broadcast(grid, shape) is not None
    full = (1,) * (len(shape) - len(grid)) + grid
    assert full == tuple(1 if b is None else n for b, n in zip(block, shape, strict=True))


def test_the_axis_is_told_by_position_not_by_size() -> None:
    assert broadcast_of((4, 1), (4, 4)) is Broadcast.ROWS
    assert broadcast_of((4,), (4, 4)) is Broadcast.CHANNEL
    assert broadcast_of((1, 4, 1), (1, 4, 4)) is Broadcast.ROWS
    assert broadcast_of((4, 1, 1), (4, 3, 5)) is None


def test_one_entry_is_per_feature_only_of_one_feature() -> None:
    assert is_per_feature((1,), (5, 1))
    assert not is_per_feature((1,), (5, 2))
    assert not is_per_feature((), (1,))
    assert not is_per_feature((5, 1), (5, 1))


def test_symbols_are_compared_without_a_guard() -> None:
    b = GraphBuilder()
    x, y = (b.arg(name, torch.float32, size, 8) for name, size in (("x", "m"), ("y", "n")))
    m, n = x.meta["val"].shape[0], y.meta["val"].shape[0]

    assert broadcast_of((m, 1), (m, 8)) is Broadcast.ROWS
    assert broadcast_of((n, 1), (m, 8)) is None
    assert block_of((m, 8), (m, 1)) == (1, None)
    assert block_of((m, 8), (n, 1)) is None
    assert not x.meta["val"].fake_mode.shape_env.guards
