"""Quantize the linears of a BERT with torchao, compile it, and print the report."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import Dim
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
from transformers import BertConfig, BertModel

import qfuse


def main(hidden: int = 256, layers: int = 2, **options: Any) -> qfuse.CompiledModel:
    """Return the compiled model, which takes any batch and length."""
    config = BertConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * hidden,
        vocab_size=1000,
    )
    model = BertModel(config, add_pooling_layer=False).eval()
    quantize_(model, Int8DynamicActivationInt8WeightConfig())

    tokens = torch.randint(1000, (2, 16))
    sizes = {0: Dim("batch", min=1, max=64), 1: Dim("seq", min=1, max=512)}
    fast = qfuse.compile(model, (tokens,), dynamic_shapes={"input_ids": sizes}, **options)

    other = torch.randint(1000, (3, 40))
    with torch.no_grad():
        error = (fast(other).last_hidden_state - model(other).last_hidden_state).abs().mean()
    print(f"mean difference for another size: {error:.1e}")
    return fast


if __name__ == "__main__":
    print(main().report)
