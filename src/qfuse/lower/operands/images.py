"""Images that kernels read in place."""

from __future__ import annotations

import torch

from qfuse.ir.dtypes import BYTES
from qfuse.ir.graph.schema import arguments, is_call
from qfuse.ir.graph.stage_graph import CLAIM_META
from qfuse.ir.memory_formats import CHANNELS, channels_last_of, format_of, has_fastest_channels
from qfuse.ir.ops.views import tensor_of
from qfuse.rewrite.prelude import Node, aten


def channels_last_parts(node: Node) -> tuple[Node, ...] | None:
    """Return the images of a cat along channels that kernels read in place, or ``None``.

    They are channels-last, of int8 or of uint8, and so is the result.
    """
    if not is_call(node, aten.cat.default) or CLAIM_META in node.meta:
        return None
    a, value = arguments(node), tensor_of(node)
    last = channels_last_of(value.dim())
    parts, axis = a["tensors"], a["dim"]
    if last is None or axis not in {CHANNELS, CHANNELS - value.dim()}:
        return None
    assert isinstance(parts, (list, tuple)), "a cat has a list"
    images = tuple(part for part in parts if isinstance(part, Node))
    # The result of torch lies like the first image, or row by row if they differ.
    if len(images) < 2 or format_of(value) is not last:  # noqa: PLR2004
        return None
    return images if all(_fits(part, value) for part in images) else None


def _fits(part: Node, joined: torch.Tensor) -> bool:
    """Whether the kernel reads a part in place."""
    value = tensor_of(part)
    stored = value.dtype in BYTES and value.dtype is joined.dtype
    return stored and value.dim() == joined.dim() and has_fastest_channels(value)
