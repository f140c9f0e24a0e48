"""The view ops that keep all elements in row-major order, and the ops that permute axes."""

from __future__ import annotations

from torch._ops import OpOverload

from qfuse.ir.aten import aten

SIZED_VIEWS: tuple[OpOverload, ...] = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
)
"""Views that take the whole new shape."""

SQUEEZES: tuple[OpOverload, ...] = (
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
"""Views that drop axes of size 1."""

RESHAPES: tuple[OpOverload, ...] = (*SIZED_VIEWS, *SQUEEZES, aten.unsqueeze.default)
"""All row-major views."""

TURNS: tuple[OpOverload, ...] = (aten.permute.default, aten.transpose.int, aten.t.default)
"""Views that permute axes."""
