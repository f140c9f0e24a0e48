"""Agreement of embeddings, on sentences whose neighbours are known."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import normalize

from qfuse_bench.harness.retrieval import compare_embeddings, nearest


def angles(*degrees: float) -> torch.Tensor:
    """Unit vectors in the plane."""
    turn = torch.tensor([math.radians(d) for d in degrees])
    return torch.stack([turn.cos(), turn.sin()], 1)


def test_nearest_is_another_sentence() -> None:
    assert nearest(angles(0, 10, 30, 100, 95)).tolist() == [1, 0, 1, 4, 3]


def test_equal_embeddings_agree() -> None:
    x = normalize(torch.randn(20, 8), dim=1)
    agreement = compare_embeddings(x, x.clone())

    assert agreement.mean_cosine == pytest.approx(1.0)
    assert agreement.least_cosine == pytest.approx(1.0)
    assert agreement.same_nearest == 1.0


def test_a_common_turn_changes_cosines_and_no_neighbour() -> None:
    agreement = compare_embeddings(angles(0, 10, 30, 100), angles(60, 70, 90, 160))

    assert agreement.mean_cosine == pytest.approx(0.5)
    assert agreement.same_nearest == 1.0


def test_a_moved_sentence_changes_neighbours() -> None:
    # The third goes from the side of the second to the side of the fourth.
    agreement = compare_embeddings(angles(0, 10, 25, 100), angles(0, 10, 85, 100))

    assert agreement.same_nearest == 0.75
    assert agreement.least_cosine == pytest.approx(0.5)
    assert agreement.mean_cosine == pytest.approx(3.5 / 4)


def test_other_shapes_do_not_compare() -> None:
    with pytest.raises(ValueError, match="do not compare"):
        compare_embeddings(torch.ones(3, 2), torch.ones(4, 2))
