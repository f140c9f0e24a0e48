"""The effect of quantization on sentence embeddings: cosines and nearest neighbours.

Embeddings are unit vectors, [sentences, width]; a cosine is a dot product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of embeddings with those of the float model.

    Attributes:
        mean_cosine: Mean over sentences of the cosine between the two embeddings.
        least_cosine: The worst sentence.
        same_nearest: Fraction of sentences whose nearest *other* sentence is the same one.
    """

    mean_cosine: float
    least_cosine: float
    same_nearest: float


def nearest(embeddings: torch.Tensor) -> torch.Tensor:
    """Return, for every sentence, the index of the nearest other one."""
    close = embeddings @ embeddings.T
    close.fill_diagonal_(-torch.inf)
    return close.argmax(1)


def compare_embeddings(reference: torch.Tensor, other: torch.Tensor) -> Agreement:
    """Compare embeddings with those of the float model, sentence by sentence.

    Every sentence queries all others, each side among its own embeddings.
    """
    if reference.shape != other.shape:
        raise ValueError(f"{tuple(reference.shape)} and {tuple(other.shape)} do not compare")
    exact, approximate = reference.double(), other.double()
    cosine = torch.nn.functional.cosine_similarity(exact, approximate, dim=1)
    same = nearest(exact) == nearest(approximate)
    return Agreement(float(cosine.mean()), float(cosine.min()), float(same.double().mean()))
