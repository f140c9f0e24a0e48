"""Quantize and compile the transformer inside a SentenceTransformer, and in a pipeline.

Run: python examples/scripts/sentence_encoder.py FOLDER, with the folder of a BERT sentence encoder.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import nn
from torch.export import Dim
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
from transformers import pipeline

import qfuse

TEXTS = ("A compiler translates a program.", "The weights are integers.", "It rained all day.")


class Compiled(nn.Module):
    """A compiled BERT that takes the keywords that libraries pass, and has their attributes."""

    def __init__(self, bert: Any, fast: qfuse.CompiledModel) -> None:
        super().__init__()
        self.fast, self.config = fast, bert.config
        self.device, self.dtype = torch.device("cpu"), torch.float32

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor,
        **_options: Any,
    ) -> Any:
        """Return the model's output for int64 tokens [batch, seq]."""
        return self.fast(input_ids, attention_mask, token_type_ids)


def compiled(bert: Any, tokens: dict[str, torch.Tensor], **options: Any) -> Compiled:
    """Compile a quantized BERT for any batch and length up to its positions."""
    batch = Dim("batch", min=1, max=256)
    seq = Dim("seq", min=1, max=bert.config.max_position_embeddings)
    names = ("input_ids", "attention_mask", "token_type_ids")
    fast = qfuse.compile(
        bert,
        tuple(tokens[name] for name in names),
        dynamic_shapes={name: {0: batch, 1: seq} for name in names},
        **options,
    )
    return Compiled(bert, fast)


def main(folder: str, **options: Any) -> dict[str, Any]:
    """Encode with the quantized model and with the compiled one, in both libraries."""
    encoder = SentenceTransformer(folder, device="cpu", local_files_only=True)
    bert = encoder[0].model
    quantize_(bert, Int8DynamicActivationInt8WeightConfig())
    features = pipeline("feature-extraction", model=bert, tokenizer=encoder.tokenizer, device="cpu")
    want = encoder.encode(list(TEXTS)), features(list(TEXTS))

    fast = compiled(bert, encoder.preprocess(list(TEXTS)), **options)
    encoder[0].model = features.model = fast
    return {
        "quantized": want,
        "compiled": (encoder.encode(list(TEXTS)), features(list(TEXTS))),
        "report": fast.fast.report,
        "encoder": encoder,
    }


if __name__ == "__main__":
    result = main(sys.argv[1])
    difference = abs(result["quantized"][0] - result["compiled"][0]).max()
    print(f"{len(result['report'].fused)} quantized ops; embeddings differ by {difference:.1e}")
