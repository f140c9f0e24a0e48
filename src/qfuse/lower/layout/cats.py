"""Cats of quantized channels-last images along their channels, on qfuse's own kernel."""

from __future__ import annotations

from functools import partial

import torch

from qfuse.ir.dtypes import BYTES
from qfuse.ir.events import Lowered
from qfuse.ir.graph.schema import arguments, is_call
from qfuse.ir.graph.stage_graph import CLAIM_META, place_of
from qfuse.ir.memory_formats import channels_last_of, format_of, has_fastest_channels
from qfuse.ir.ops.views import dtype_of, shape_of, tensor_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.lower.operands.own_kernel import OwnKernel
from qfuse.lower.select.context import LoweringContext
from qfuse.rewrite.prelude import Exactness, Node, Rewriter, aten

CAT_CHANNELS = "qfuse.cat_channels"
"""The name of the kernel."""

_CHANNELS = 1

Parts = tuple[Node, ...]


def lower_cats(context: LoweringContext) -> None:
    """Replace ``cat(images, 1)`` of int8 or uint8 by the kernel if all images are channels-last.

    torch copies one image after the other; the kernel joins a strip of pixels of all of them.
    """
    if not any(
        isinstance(kernel, OwnKernel) and kernel.supported(context.target) is None
        for kernel in context.kernels
    ):
        return
    for node in list(context.program.graph.nodes):
        parts = channels_last_parts(node)
        if parts is None:
            continue
        sizes = " + ".join(str(shape_of(part)[_CHANNELS]) for part in parts)
        what = f"cat of {dtype_name(dtype_of(node))} images, {sizes} channels"
        event = Lowered(context.stage, place_of(node), CAT_CHANNELS, what)
        context.session.rewrite(
            "lower-cat",
            node,
            partial(_join, node, parts),
            proof=Exactness.EXACT,
            event=partial(_always, event),
        )


def _always(event: Lowered, *_: object) -> Lowered:
    return event


def _join(node: Node, parts: Parts, rw: Rewriter) -> None:
    first, *others = parts
    rw.replace(node, rw.call(torch.ops.qfuse.cat_channels.default, first, others))


def channels_last_parts(node: Node) -> Parts | None:
    """Return the images of a cat along channels that kernels read in place, or ``None``.

    They are channels-last, of int8 or of uint8, and so is the result.
    """
    if not is_call(node, aten.cat.default) or CLAIM_META in node.meta:
        return None
    a, value = arguments(node), tensor_of(node)
    last = channels_last_of(value.dim())
    parts, axis = a["tensors"], a["dim"]
    if last is None or axis not in {_CHANNELS, _CHANNELS - value.dim()}:
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
