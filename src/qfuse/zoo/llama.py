"""Llama: grouped queries, rotary positions, SwiGLU; over a whole prompt, or one token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qfuse.zoo._extras import cache_argument, transformers
from qfuse.zoo.family import Example, Family, Sizes
from qfuse.zoo.weights import cast_weights, perturb, seeded


@dataclass(frozen=True, kw_only=True)
class LlamaSizes(Sizes):
    """Sizes of a Llama.

    Attributes:
        layers: Decoder layers.
        hidden: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key and value heads.
        intermediate: Width inside the MLP.
        vocab: Tokens.
        seq: Length of the prompt; for decoding, length of the cache.
    """

    layers: int = 4
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    intermediate: int = 2816
    vocab: int = 8192
    seq: int = 256

    def __post_init__(self) -> None:
        """Refuse head counts that do not divide."""
        super().__post_init__()
        self.require_multiple("hidden", "heads")
        self.require_multiple("heads", "kv_heads")

    @property
    def longest(self) -> int:
        """Greatest prompt length."""
        return max(2048, self.seq)


class LlamaPrefill(nn.Module):
    """A prompt goes in, the logits of every position come out; no cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, seq, vocab] for tokens [batch, seq]."""
        logits: torch.Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits


class _Cache:
    """One step's view of the cache buffers, as `transformers` attention asks for it."""

    def __init__(self, keys: list[torch.Tensor], values: list[torch.Tensor], at: torch.Tensor):
        self.keys, self.values, self.at = keys, values, at

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token's key and value in place and return the whole cache of the layer."""
        # Under autocast they come in another dtype than the cache has.
        self.keys[layer].index_copy_(2, self.at, key.to(self.keys[layer].dtype))
        self.values[layer].index_copy_(2, self.at, value.to(self.values[layer].dtype))
        return self.keys[layer], self.values[layer]


class LlamaDecode(nn.Module):
    """One token goes in, its logits come out; keys and values live in buffers of this module.

    The buffers `keys_<layer>` and `values_<layer>`, [batch, kv_heads, seq, head], are written in
    place at `position`. A caller that starts at position 0 need not clear them: what lies after
    `position` is masked.
    """

    def __init__(self, model: nn.Module, sizes: LlamaSizes) -> None:
        super().__init__()
        self.model = model
        self.cache_argument = cache_argument(model)
        self.layers, self.length = sizes.layers, sizes.seq
        shape = (sizes.batch, sizes.kv_heads, sizes.seq, sizes.hidden // sizes.heads)
        for layer in range(sizes.layers):
            # As if a prefix were there: attention over zeros would hide a wrong mask.
            self.register_buffer(f"keys_{layer}", torch.randn(shape))
            self.register_buffer(f"values_{layer}", torch.randn(shape))

    def forward(self, input_ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, 1, vocab] for tokens [batch, 1] at position [1], int64."""
        cache = _Cache(
            [self.get_buffer(f"keys_{layer}") for layer in range(self.layers)],
            [self.get_buffer(f"values_{layer}") for layer in range(self.layers)],
            position,
        )
        # The whole cache is attended to, so that no size depends on the position.
        seen = torch.arange(self.length, device=position.device) <= position
        logits: torch.Tensor = self.model(
            input_ids=input_ids,
            attention_mask=seen.view(1, 1, 1, -1),
            position_ids=position.unsqueeze(0),
            use_cache=True,
            **{self.cache_argument: cache},
        ).logits
        return logits


def _causal_lm(sizes: LlamaSizes) -> nn.Module:
    library = transformers()
    config = library.LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=sizes.longest,
        # With the library's 0.02, the branches of a small model vanish next to the residual stream.
        initializer_range=sizes.hidden**-0.5,
        attn_implementation="sdpa",
    )
    model: nn.Module = library.LlamaForCausalLM(config)
    perturb(model)
    return model


def _prefill(sizes: LlamaSizes) -> nn.Module:
    with seeded(sizes.seed):
        return cast_weights(LlamaPrefill(_causal_lm(sizes)), sizes.dtype).eval()


def _decode(sizes: LlamaSizes) -> nn.Module:
    with seeded(sizes.seed):
        return cast_weights(LlamaDecode(_causal_lm(sizes), sizes), sizes.dtype).eval()


def _prompt(sizes: LlamaSizes, seed: int) -> Example:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randint(sizes.vocab, (sizes.batch, sizes.seq), generator=draw),), {}


def _token(sizes: LlamaSizes, seed: int) -> Example:
    draw = torch.Generator().manual_seed(seed)
    token = torch.randint(sizes.vocab, (sizes.batch, 1), generator=draw)
    return (token, torch.randint(sizes.seq, (1,), generator=draw)), {}


def _limits(sizes: LlamaSizes) -> Mapping[str, int]:
    return {"batch": max(64, sizes.batch), "seq": sizes.longest}


PREFILL = Family(
    description="Llama decoder over a whole prompt, without a cache (random weights)",
    sizes=LlamaSizes,
    module=_prefill,
    inputs=_prompt,
    axes={"input_ids": {0: "batch", 1: "seq"}},
    limits=_limits,
)
DECODE = Family(
    description="Llama decoder, one token with a key-value cache in buffers (random weights)",
    sizes=LlamaSizes,
    module=_decode,
    inputs=_token,
    axes={},
    limits=_limits,
)
