"""The predicted time of a lowered graph: of its kernels, float products and conversions."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.fx import Node

from qfuse.analysis.products import as_product
from qfuse.cost import WorkRange, pointwise_work, size_range, without_calls
from qfuse.cost.model import CostModel
from qfuse.ir.aten import aten
from qfuse.ir.dtypes import BYTES, COMPUTE_DTYPES, bit_width
from qfuse.ir.events import NO_KERNELS, Lowered
from qfuse.ir.graph.schema import arguments, is_call
from qfuse.ir.graph.stage_graph import LoweredGraph
from qfuse.ir.ops.views import dtype_of, node_of, shape_of


def predicted_seconds(lowered: LoweredGraph, cost: CostModel) -> float:
    """Return the predicted seconds per call that depend on what is quantized.

    They are those of all kernels, of the float products, and of the passes that convert between
    floats and bytes. Other ops, such as norms and attention in float, are the same in a quantized
    and in a float layer, and are left out: use differences between two plans of one model.
    """
    kernels = sum(
        event.predicted or 0.0
        for event in lowered.log.of(Lowered)
        if event.kernel not in NO_KERNELS
    )
    return kernels + cost.seconds(_rest(lowered))


def _rest(lowered: LoweredGraph) -> Iterator[WorkRange]:
    symbols = lowered.signature.symbols
    for node in lowered.graph.nodes:
        product = as_product(node)
        if product is not None and dtype_of(node) in COMPUTE_DTYPES:
            yield product.float_work(symbols)
        elif _converts(node):
            elements = size_range(math.prod(shape_of(node)), symbols)
            source = node_of(arguments(node)["self"])
            bits = [bit_width(dtype_of(source))], [bit_width(dtype_of(node))]
            # The compiler fuses the cast with the arithmetic around it.
            yield without_calls(pointwise_work(elements, *bits))


def _converts(node: Node) -> bool:
    """Whether ``node`` casts floats to bytes, or bytes to floats."""
    if not is_call(node, aten._to_copy.default) or not isinstance(
        node.meta.get("val"), torch.Tensor
    ):
        return False
    kinds = {dtype_of(node), dtype_of(node_of(arguments(node)["self"]))}
    return bool(kinds & {*BYTES}) and bool(kinds & {*COMPUTE_DTYPES})
