"""Generate greedily with a quantized Llama: one compiled step, and a cache that it writes."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import qfuse


class Step(nn.Module):
    """One token through the model; keys and values are buffers of fixed size."""

    def __init__(self, model: LlamaForCausalLM, length: int) -> None:
        super().__init__()
        self.model = model
        # transformers 5.24 renamed the argument.
        renamed = "cache" in signature(model.forward).parameters
        self.argument = "cache" if renamed else "past_key_values"
        self.cache = StaticCache(config=model.config, max_cache_len=length)
        config = model.config
        head = config.hidden_size // config.num_attention_heads
        self.cache.early_initialization(
            1, config.num_key_value_heads, head, torch.float32, torch.device("cpu")
        )
        for index, layer in enumerate(self.cache.layers):
            # The compiled step writes them, so they are buffers: keys, values and the position.
            for name, value in vars(layer).items():
                if isinstance(value, torch.Tensor):
                    self.register_buffer(f"{name}_{index}", value, persistent=False)

    def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return logits [1, vocabulary] for an int64 token [1, 1] at int64 position [1]."""
        out = self.model(
            input_ids=token,
            position_ids=position[None],
            cache_position=position,
            **{self.argument: self.cache},
        )
        logits: torch.Tensor = out.logits[:, -1]
        return logits


def generate(step: Any, prompt: list[int], n: int) -> list[int]:
    """Return ``n`` tokens after ``prompt``, the most likely ones."""
    tokens = list(prompt)
    with torch.no_grad():
        for position in range(len(prompt) + n - 1):
            logits = step(torch.tensor([[tokens[position]]]), torch.tensor([position]))
            if position >= len(prompt) - 1:
                tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def main(hidden: int = 128, layers: int = 2, **options: Any) -> tuple[list[int], list[int], Any]:
    """Return the tokens of the quantized model, those of the compiled one, and the latter."""
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=2 * hidden,
        vocab_size=500,
    )
    model = LlamaForCausalLM(config).eval()
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    step = Step(model, length=32)
    fast = qfuse.compile(step, (torch.tensor([[1]]), torch.tensor([0])), **options)
    have = generate(fast, [1, 2, 3], 8)
    step.cache.reset()
    return generate(step, [1, 2, 3], 8), have, fast


if __name__ == "__main__":
    theirs, ours, compiled = main()
    print(f"quantized: {theirs}\ncompiled:  {ours}\n{compiled.report}")
