"""Cats of quantized channels-last images along their channels, on qfuse's own kernel."""

from __future__ import annotations

from functools import partial

import torch

from qfuse.ir.events import Lowered
from qfuse.ir.graph.stage_graph import SITE_META, place_of, site_of
from qfuse.ir.memory_formats import CHANNELS
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.lower.operands.images import channels_last_parts
from qfuse.lower.operands.own_kernel import has_own_kernels
from qfuse.lower.select.context import LoweringContext
from qfuse.rewrite.prelude import Exactness, Node, Rewriter

CAT_CHANNELS = "qfuse.cat_channels"
"""The name of the kernel."""


def lower_cats(context: LoweringContext) -> None:
    """Replace ``cat(images, 1)`` of int8 or uint8 by the kernel if all images are channels-last.

    torch copies one image after the other; the kernel joins a strip of pixels of all of them.
    """
    if not has_own_kernels(context.kernels, context.target):
        return
    for node in list(context.program.graph.nodes):
        parts = channels_last_parts(node)
        if parts is None:
            continue
        sizes = " + ".join(str(shape_of(part)[CHANNELS]) for part in parts)
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


def _join(node: Node, parts: tuple[Node, ...], rw: Rewriter) -> None:
    first, *others = parts
    joined = rw.call(torch.ops.qfuse.cat_channels.default, first, others)
    joined.meta[SITE_META] = site_of(node)
    rw.replace(node, joined)
