"""Operands and masks of attention, and its values in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Batch, heads, heads of keys, queries, keys, features and width: around vectors, panels of 64 keys,
# blocks of 48 queries and chunks of 512 keys.
SIZES = (
    (1, 2, 2, 16, 5, 8, 8),
    (2, 4, 2, 64, 64, 32, 32),
    (1, 1, 1, 49, 65, 3, 5),
    (1, 3, 1, 97, 513, 20, 36),
    (3, 2, 2, 17, 70, 80, 80),
    (1, 1, 1, 16, 1, 1, 1),
    (1, 1, 1, 48, 1030, 128, 130),
    # Few queries, which read keys in place.
    (1, 2, 2, 15, 5, 8, 8),
    (2, 4, 2, 1, 600, 64, 64),
    (1, 8, 2, 3, 1030, 20, 36),
    (3, 3, 1, 5, 70, 80, 81),
)
MASKS = ("none", "causal", "rows", "keys", "heads", "bool", "batch", "future", "one")
SCALE = 0.3
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (F32, BF16, F16)
# Of the largest value. Sums of products of up to 130 features, and of weights of up to 1030 keys that
# sum to 1; the result is rounded, and where products are in bfloat16 so are weights.
BOUNDS = {F32: 4e-6, BF16: 2**-8 + 4e-6, F16: 2**-11 + 4e-6}


def operands(
    size: tuple[int, ...], dtype: torch.dtype = F32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as projections leave them: heads beside features."""
    batch, heads, shared, rows, keys, depth, width = size
    return (
        torch.randn(batch, rows, heads, depth).to(dtype).transpose(1, 2),
        torch.randn(batch, keys, shared, depth).to(dtype).transpose(1, 2),
        torch.randn(batch, keys, shared, width).to(dtype).transpose(1, 2),
    )


def mask_of(kind: str, size: tuple[int, ...], dtype: torch.dtype = F32) -> torch.Tensor | None:
    batch, heads, _, rows, keys, _, _ = size
    if kind in ("none", "causal"):
        return None
    if kind == "future":
        return torch.full((rows, keys), -torch.inf, dtype=dtype).triu(1)
    if kind in ("bool", "batch"):
        shape = (rows, keys) if kind == "bool" else (batch, 1, 1, keys)
        kept = torch.rand(shape) > 0.4
        kept[..., 0] = True
        return kept
    shapes = {
        "rows": (batch, 1, rows, keys), "keys": (1, keys), "heads": (heads, rows, keys),
        "one": (batch, heads, rows, 1),
    }  # fmt: skip
    return torch.randn(shapes[kind]).to(dtype)


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> torch.Tensor:
    """The same in float64."""
    wide = mask.double() if mask is not None and mask.is_floating_point() else mask
    return F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), wide, 0.0, causal, scale=SCALE,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
