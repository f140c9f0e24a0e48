"""What a recipe says about the places that it leaves in float, and why."""

from __future__ import annotations

from typing import Any

import torch
from tests.support.graphs.tiny_models import sqnr, tiny
from torch import nn

from qfuse.zoo.recipes import quantize

ONLY_LINEAR = "this recipe quantizes linear layers only"
PRODUCT = "X86InductorQuantizer's default leaves products of activations float"
TABLE = "an embedding is a table that is looked up, not multiplied: it stays float"


class TestNotes:
    """What was not quantized, and why."""

    def notes(self, model: nn.Module, recipe: str, *args: torch.Tensor) -> list[str]:
        return [str(note) for note in quantize(model, recipe, args).notes]

    def test_layers_that_do_not_divide_into_groups(self) -> None:
        model = nn.Sequential(nn.Linear(64, 100), nn.Linear(100, 64), nn.Linear(64, 4))
        reason = "1: in_features is not a multiple of the group size 32"
        assert self.notes(model, "w4a8", torch.randn(2, 64)) == [reason]
        assert self.notes(model, "w8a8-dynamic", torch.randn(2, 64)) == []

    def test_one_input_feature(self) -> None:
        model, x = nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 8)), torch.randn(4, 1)
        for recipe in ("w8a8-dynamic", "w8a16", "fp8"):
            reason = "0: torchao cannot quantize a weight with one input feature"
            assert self.notes(model, recipe, x) == [reason]

    def test_layers_whose_weight_is_not_their_own(self) -> None:
        class Several(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
                self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
                self.plain = nn.Linear(8, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = self.plain(self.normed(self.attention(x, x, x)[0]))
                return out

        model, x = Several().eval(), torch.randn(2, 3, 8)
        result = quantize(model, "w8a16", (x,))
        assert result.layers == 1
        assert [str(note) for note in result.notes] == [
            "attention.out_proj: MultiheadAttention reads this layer's weight directly",
            "normed: its weight is computed (a parametrization), so it cannot be replaced",
            "attention: it reads its projection weights directly, not through linear layers",
            f"normed.parametrizations.weight: ParametrizationList: {ONLY_LINEAR}",
        ]
        with torch.no_grad():
            assert sqnr(model(x), result.model(x)) > 30

    def test_what_is_quantized_already(self) -> None:
        x = torch.randn(2, 64)
        first = quantize(nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 8)), "w4a16", (x,))
        second = quantize(first.model, "w8a8-dynamic", (x,))
        assert (first.layers, second.layers) == (1, 1)
        assert [str(note) for note in second.notes] == ["0: it is quantized already"]

    def test_tied_weights(self) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embedding = nn.Embedding(16, 64)
                self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
                self.head = nn.Linear(64, 16)
                self.second.weight = self.first.weight
                self.head.weight = self.embedding.weight

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = self.head(self.second(self.first(self.embedding(x))))
                return out

        model = Tied()
        result = quantize(model, "w8a8-dynamic", (torch.arange(4),))
        quantized: Any = result.model
        assert quantized.first.weight is quantized.second.weight
        assert quantized.head.weight is not quantized.embedding.weight
        assert model.head.weight is model.embedding.weight
        assert [str(note) for note in result.notes] == [
            "embedding: it shares its weight with head, and keeps the float copy",
            f"embedding: {TABLE}",
        ]

    def test_a_model_that_is_a_linear_shares_nothing_with_itself(self) -> None:
        result = quantize(nn.Linear(32, 8), "w8a8-dynamic", (torch.randn(2, 32),))
        assert result.notes == ()

    def test_pt2e_names_convolutions_products_and_embeddings(self) -> None:
        model = tiny("whisper-encoder")
        notes = [str(note) for note in quantize(model.module, "w8a8-static", model.args).notes]
        assert notes == [
            "encoder.conv1, encoder.conv2: X86InductorQuantizer left this conv1d in float",
            f"scaled_dot_product_attention (1): {PRODUCT}",
            f"encoder.embed_positions: {TABLE}",
        ]

    def test_many_places_are_cut_short(self) -> None:
        model = nn.Sequential(*(nn.Conv1d(1, 1, 1) for _ in range(5)), nn.Linear(8, 8))
        (note,) = self.notes(model, "w8a16", torch.randn(1, 1, 8))
        assert note == f"0, 1, 2 and 2 more: Conv1d: {ONLY_LINEAR}"
