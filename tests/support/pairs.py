"""Combinations of parameters: a few that hold every pair of values are tested by ``make test``."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pytest

__all__ = ["every_pair", "mark_the_rest"]


def mark_the_rest(items: Iterable[Any]) -> None:
    """Mark as ``thorough`` what a test with the marker ``pairs`` does not need for every pair.

    What is ``thorough`` already holds no pair.
    """
    tests = defaultdict(list)
    for item in items:
        marked = item.get_closest_marker("pairs") is not None
        if marked and item.get_closest_marker("thorough") is None:
            tests[item.path, item.originalname].append(item)
    for found in tests.values():
        # A value is the same object in every combination; it need not be hashable.
        rows = [tuple(map(id, item.callspec.params.values())) for item in found]
        kept = every_pair(rows)
        for item, row in zip(found, rows, strict=True):
            if row not in kept:
                item.add_marker(pytest.mark.thorough)


def every_pair(rows: Sequence[tuple[Hashable, ...]]) -> set[tuple[Hashable, ...]]:
    """Return few of the rows that hold every pair of values that the rows hold.

    Each step takes the first row with the most pairs that are missing so far.
    """
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in rows}
    missing = set().union(*pairs.values())
    kept: set[tuple[Hashable, ...]] = set()
    while missing:
        best = max(pairs, key=lambda row: len(pairs[row] & missing))
        kept.add(best)
        missing -= pairs.pop(best)
    return kept
