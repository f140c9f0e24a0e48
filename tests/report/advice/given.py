"""Problems of integers that are passed in with their scales and zero points."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.report.advice.models import Forward, by_hand, pointwise, rounded

from qfuse.ir.events import MissCode

GIVEN: tuple[tuple[str, MissCode, Forward, Forward], ...] = (
    (
        "zero-point-in-range",
        MissCode.NO_KERNEL,
        lambda m, q, s, z: F.linear((q.int() - z) * s, by_hand(m)),
        lambda m, q, s, z: F.linear((q.int() - z.clamp(-128, 127)) * s, by_hand(m)),
    ),
    (
        "zero-point-as-integer",
        MissCode.NOT_CONSTANT,
        lambda m, q, s, z: F.linear((q.float() - z * 1.0) * s, by_hand(m)),
        lambda m, q, s, z: F.linear((q.float() - z.to(torch.int8)) * s, by_hand(m)),
    ),
    (
        "zero-point-before-scale",
        MissCode.ORDER,
        lambda m, q, s, z: F.linear(q.float() * s - z * s, by_hand(m)),
        lambda m, q, s, z: F.linear((q.float() - z.to(torch.int8)) * s, by_hand(m)),
    ),
    (
        "activation-in-8-bits",
        MissCode.RANGE,
        lambda m, q, s, z: F.linear((q + z) * s, by_hand(m)),
        lambda m, q, s, z: F.linear(torch.clamp(q + z, -128, 127) * s, by_hand(m)),
    ),
    (
        "one-dtype-of-the-product",
        MissCode.ARITHMETIC,
        lambda m, q, s, _: F.linear((q * s).bfloat16().float(), by_hand(m)),
        lambda m, q, s, _: F.linear((q * s).bfloat16(), by_hand(m).bfloat16()),
    ),
    (
        "scale-as-tensor",
        MissCode.NOT_CONSTANT,
        lambda m, q, s, _: F.linear(q * s.amax().item(), by_hand(m)),
        lambda m, q, s, _: F.linear(q * s.amax(), by_hand(m)),
    ),
    (
        "relu-before-scale",
        MissCode.RANGE,
        lambda m, q, s, _: F.linear(torch.relu(q.float() * s), by_hand(m)),
        lambda m, q, s, _: F.linear(torch.relu(q.float()) * s, by_hand(m)),
    ),
    (
        "cast-to-8-bits",
        MissCode.DTYPE,
        lambda m, q, s, _: F.linear(torch.round(q * s / 0.05) * 0.05, by_hand(m)),
        lambda m, q, s, _: F.linear(rounded(q * s), by_hand(m)),
    ),
    (
        "quantize-behind-op",
        MissCode.NOT_QUANTIZED,
        lambda m, q, s, _: F.linear(F.leaky_relu(q.float() * s), by_hand(m)),
        lambda m, q, s, _: F.linear(rounded(F.leaky_relu(q.float() * s)), by_hand(m)),
    ),
    (
        "mask-by-fill",
        MissCode.SHAPE,
        lambda m, q, s, _: F.linear(q.float() * s * (q > 5).float(), by_hand(m)),
        lambda m, q, s, _: F.linear((q.float() * s).masked_fill(q <= 5, 0), by_hand(m)),
    ),
    (
        "one-scale-for-parts",
        MissCode.GRANULARITY,
        lambda m, q, s, _: F.linear(
            torch.cat([q[:, :128] * s, q[:, 128:] * (s * 2)], 1), by_hand(m)
        ),
        lambda m, q, s, _: F.linear(torch.cat([q[:, :128] * s, q[:, 128:] * s], 1), by_hand(m)),
    ),
    (
        "activation-scale-per-tensor",
        MissCode.GRANULARITY,
        lambda m, q, s, _: F.conv2d(
            q.view(1, 64, 16, 16) * s[:, :, None] * m.s.view(16, 16), pointwise(m)
        ),
        lambda m, q, s, _: F.conv2d(q.view(1, 64, 16, 16) * s.amax(), pointwise(m)),
    ),
    (
        "activation-scale-per-row",
        MissCode.GRANULARITY,
        lambda m, q, s, _: F.linear(q * s * m.s, by_hand(m)),
        lambda m, q, s, _: F.linear(q * s, by_hand(m)),
    ),
)
"""The suggestion, the code of the miss, the model with the problem, and the one without."""
