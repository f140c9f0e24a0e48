"""BERT: an encoder with an attention mask, keyword inputs and a dataclass output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from qfuse.zoo._extras import transformers
from qfuse.zoo.family import Example, Family, Sizes
from qfuse.zoo.weights import cast_weights, perturb, seeded


@dataclass(frozen=True, kw_only=True)
class BertSizes(Sizes):
    """Sizes of a BERT.

    Attributes:
        layers: Encoder layers.
        hidden: Width of the residual stream.
        heads: Attention heads.
        intermediate: Width inside the MLP.
        vocab: Tokens.
        seq: Length of the texts.
    """

    batch: int = 4
    layers: int = 4
    hidden: int = 768
    heads: int = 12
    intermediate: int = 3072
    vocab: int = 30522
    seq: int = 128

    def __post_init__(self) -> None:
        """Refuse a head count that does not divide."""
        super().__post_init__()
        self.require_multiple("hidden", "heads")

    @property
    def longest(self) -> int:
        """Greatest text length."""
        return max(512, self.seq)


def padded_tokens(
    batch: int, seq: int, vocab: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Draw tokens with masks of different lengths: the first row is full, the others are padded."""
    lengths = torch.randint(1, seq + 1, (batch, 1), generator=generator)
    lengths[0] = seq
    mask = (torch.arange(seq) < lengths).long()
    # Token 0 is the padding.
    tokens = torch.randint(1, max(2, vocab), (batch, seq), generator=generator)
    return {"input_ids": tokens * mask, "attention_mask": mask}


def _module(sizes: BertSizes) -> nn.Module:
    library = transformers()
    config = library.BertConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        max_position_embeddings=sizes.longest,
        # With the library's 0.02, the branches of a small model vanish next to the residual stream.
        initializer_range=sizes.hidden**-0.5,
        attn_implementation="sdpa",
    )
    with seeded(sizes.seed):
        # The library's own module, for its dataclass output and its keyword inputs.
        model: nn.Module = library.BertModel(config)
        perturb(model)
        return cast_weights(model, sizes.dtype).eval()


def _inputs(sizes: BertSizes, seed: int) -> Example:
    draw = torch.Generator().manual_seed(seed)
    return (), padded_tokens(sizes.batch, sizes.seq, sizes.vocab, draw)


def _limits(sizes: BertSizes) -> Mapping[str, int]:
    return {"batch": max(64, sizes.batch), "seq": sizes.longest}


FAMILY = Family(
    description="BERT encoder with padding and pooler (random weights)",
    sizes=BertSizes,
    module=_module,
    inputs=_inputs,
    axes={
        "input_ids": {0: "batch", 1: "seq"},
        "attention_mask": {0: "batch", 1: "seq"},
    },
    limits=_limits,
)
