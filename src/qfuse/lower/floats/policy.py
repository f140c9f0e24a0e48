"""When a product may run in float although a quantized kernel takes it."""

from __future__ import annotations

from dataclasses import dataclass

MB = 1_000_000
# A number that depends on the model's size would let a small model waste little and a large one
# much. This lets BERT and ViT run in float as a whole, and keeps the blocks of a language model
# quantized, which was quantized to fit.
MEMORY_BYTES = 512 * MB


@dataclass(frozen=True, slots=True)
class FloatPolicy:
    """When a product may run in float although a quantized kernel takes it.

    Attributes:
        fastest: Whether the faster of both runs; otherwise a quantized kernel always does.
        memory_bytes: Bound on the bytes that dequantized weights add to the constants of a model.
    """

    fastest: bool = True
    memory_bytes: int = MEMORY_BYTES

    @property
    def recorded(self) -> tuple[str, int]:
        """The options that ask for it: ``prefer``, and ``float_memory`` in MB."""
        return "speed" if self.fastest else "memory", self.memory_bytes // MB


QUANTIZED = FloatPolicy(fastest=False, memory_bytes=0)
"""A quantized kernel runs wherever there is one."""
