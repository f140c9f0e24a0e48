"""Products of bytes that no linear took: torch's integer product, where it is right."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from qfuse.cost import size_range
from qfuse.ir.events import Lowered, Noted
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import StageGraph, SymbolRange, place_of
from qfuse.ir.ops.views import dtype_of, node_of, shape_of, tensor_of
from qfuse.ir.sizes import same_size
from qfuse.lower.kernels.aten_int_mm import INT_MM, int_mm_refusal
from qfuse.rewrite.commit import verify_and_commit
from qfuse.rewrite.driver import RewriteContext
from qfuse.rewrite.prelude import Exactness, Node, Rewriter, arguments, aten
from qfuse.rewrite.rewriter import GraphEditor
from qfuse.targets.target import Target

_LEAST = 2


def lower_int_products(
    program: StageGraph, target: Target, editor: GraphEditor, context: RewriteContext
) -> None:
    """Turn ``mm(int32(a), int32(b))`` of bytes back into ``_int_mm(a, b)``, and say why not.

    Normalizing spells every integer product in 32 bits, which is right everywhere; rules that find
    its scales make a quantized linear of it. What is left is several times faster in bytes.
    """
    for node in list(program.graph.nodes):
        factors = _bytes_of(node)
        if factors is None:
            continue
        place, key = place_of(node), f"{context.stage}/lower-int-product@{node.name}"
        why = _why_not(factors, target, program.signature.symbols)
        if why is None and context.budget.allows(key):
            rw = editor.rewriter("lower-int-product", node)
            left, right = (_in_order(factor, rw) for factor in factors)
            rw.replace(node, rw.call(aten._int_mm.default, left, right))
            sizes = f"[{', '.join(map(str, shape_of(factors[1])))}]"
            event = Lowered(context.stage, place, INT_MM, f"int8 x int8 {sizes} -> int32")
            if verify_and_commit(rw, context, program.log, key, Exactness.EXACT, place):
                program.log.add(event)
                continue
        text = f"an int8 product runs in 32 bits, several times slower: {why or 'not permitted'}"
        program.log.add(Noted(context.stage, text, place, warn=True))


def _bytes_of(node: Node) -> tuple[Node, Node] | None:
    """Return the int8 factors of a product of 32 bits."""
    if not is_call(node, aten.mm.default) or dtype_of(node) is not torch.int32:
        return None
    a = arguments(node)
    left, right = _byte(node_of(a["self"])), _byte(node_of(a["mat2"]))
    return None if left is None or right is None else (left, right)


def _byte(node: Node) -> Node | None:
    if not is_call(node, aten._to_copy.default):
        return None
    source = node_of(arguments(node)["self"])
    return source if dtype_of(source) is torch.int8 else None


def _why_not(
    factors: tuple[Node, Node], target: Target, symbols: Mapping[str, SymbolRange]
) -> str | None:
    refusal = int_mm_refusal(target)
    if refusal is not None:
        return refusal.reason
    sizes = (*shape_of(factors[0]), *shape_of(factors[1]))
    if min(size_range(size, symbols).low for size in sizes) < _LEAST:
        return "torch._int_mm returns garbage when a size is 1, and one may be"
    return None


def _in_order(factor: Node, rw: Rewriter) -> Node:
    """Copy a factor whose rows and columns are both apart, or repeated: it is read wrongly."""
    strides = tensor_of(factor).stride()
    sizes = shape_of(factor)
    dense = any(
        same_size(strides[inner], 1) and same_size(strides[1 - inner], sizes[inner])
        for inner in (0, 1)
    )
    return factor if dense else rw.call(aten.contiguous.default, factor)
