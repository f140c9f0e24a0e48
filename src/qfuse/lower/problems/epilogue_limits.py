"""What an epilogue of qfuse's kernels may have, see kernels/csrc/kernel_api.h."""

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
        "squared_relu",
        PRELU,
    }
)
"""The activations of ``StepKind``."""

MOST_EPILOGUE_OPS = 8
"""Ops."""

MOST_EPILOGUE_OPERANDS = 4
"""Operands."""
