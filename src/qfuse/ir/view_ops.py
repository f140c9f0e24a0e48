"""The ops that show all elements in row-major order and at most change the shape, in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch._ops import OpOverload

__all__ = ["RESHAPES", "SIZED_VIEWS", "SQUEEZES", "TURNS"]

_aten = torch.ops.aten

SIZED_VIEWS: tuple[OpOverload, ...] = (
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.reshape.default,
)
"""Views that name their whole shape."""

SQUEEZES: tuple[OpOverload, ...] = (
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
)
"""Views that drop axes of size 1."""

RESHAPES: tuple[OpOverload, ...] = (*SIZED_VIEWS, *SQUEEZES, _aten.unsqueeze.default)
"""All of them."""

TURNS: tuple[OpOverload, ...] = (_aten.permute.default, _aten.transpose.int, _aten.t.default)
"""Views that put the axes in another order."""
