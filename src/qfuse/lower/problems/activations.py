"""The activations that qfuse's kernels compute in an epilogue."""

from __future__ import annotations

PRELU = "prelu"
"""The name of a leaky ReLU with slopes in an operand."""

KERNEL_ACTIVATIONS = frozenset(
    {
        "relu",
        "gelu",
        "gelu_tanh",
        "silu",
        "sigmoid",
        "tanh",
        "hardtanh",
        "hardswish",
        "hardsigmoid",
        "leaky_relu",
        "elu",
        "mish",
        "quick_gelu",
        PRELU,
    }
)
"""The activations of ``StepKind`` in kernels/csrc/kernel_api.h."""
