"""The encoder of Whisper: two 1-d convolutions over a spectrogram, then attention layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from qfuse.zoo._extras import transformers
from qfuse.zoo.family import Example, Family, Sizes
from qfuse.zoo.weights import cast_weights, perturb, seeded


@dataclass(frozen=True, kw_only=True)
class WhisperSizes(Sizes):
    """Sizes of a Whisper encoder; the defaults are those of whisper-base.

    Attributes:
        layers: Encoder layers.
        hidden: Width of the residual stream.
        heads: Attention heads.
        intermediate: Width inside the MLP.
        mels: Channels of the spectrogram.
        positions: Positions after the convolutions; the spectrogram has twice as many frames.
    """

    layers: int = 6
    hidden: int = 512
    heads: int = 8
    intermediate: int = 2048
    mels: int = 80
    positions: int = 1500

    def __post_init__(self) -> None:
        """Refuse a head count that does not divide."""
        super().__post_init__()
        self.require_multiple("hidden", "heads")


class WhisperEncoder(nn.Module):
    """A Whisper encoder that returns only its last hidden state."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_features: torch.Tensor) -> torch.Tensor:
        """Return states [batch, positions, hidden] for spectrograms [batch, mels, frames]."""
        states: torch.Tensor = self.encoder(input_features).last_hidden_state
        return states


def _module(sizes: WhisperSizes) -> nn.Module:
    library = transformers()
    config = library.WhisperConfig(
        d_model=sizes.hidden,
        encoder_layers=sizes.layers,
        encoder_attention_heads=sizes.heads,
        encoder_ffn_dim=sizes.intermediate,
        num_mel_bins=sizes.mels,
        max_source_positions=sizes.positions,
        # With the library's 0.02, the branches of a small model vanish next to the residual stream.
        init_std=sizes.hidden**-0.5,
        attn_implementation="sdpa",
        # The decoder is dropped; make it small, with tokens inside its small vocabulary.
        decoder_layers=1,
        decoder_attention_heads=1,
        decoder_ffn_dim=8,
        vocab_size=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    with seeded(sizes.seed):
        model = WhisperEncoder(library.WhisperModel(config).get_encoder())
        perturb(model)
        return cast_weights(model, sizes.dtype).eval()


def _inputs(sizes: WhisperSizes, seed: int) -> Example:
    draw = torch.Generator().manual_seed(seed)
    frames = torch.randn(sizes.batch, sizes.mels, 2 * sizes.positions, generator=draw)
    return (frames.to(sizes.dtype),), {}


def _limits(sizes: WhisperSizes) -> Mapping[str, int]:
    return {"batch": max(64, sizes.batch)}


FAMILY = Family(
    description="Whisper speech encoder with 1-d convolutions (random weights)",
    sizes=WhisperSizes,
    module=_module,
    inputs=_inputs,
    axes={"input_features": {0: "batch"}},
    limits=_limits,
)
