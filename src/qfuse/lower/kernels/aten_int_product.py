"""Lower the int8 matmuls that are not part of a linear to ``aten._int_mm`` where it is correct."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from qfuse.cost import size_range
from qfuse.ir.events import Lowered, Noted
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import SymbolRange, place_of
from qfuse.ir.ops.views import dtype_of, node_of, shape_of, tensor_of
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import same_size
from qfuse.lower.kernels.aten_int_mm import INT_MM, int_mm_refusal
from qfuse.rewrite.prelude import Exactness, Node, Rewriter, arguments, aten
from qfuse.rewrite.session import Applied, RewriteSession
from qfuse.targets.target import Target

# oneDNN trusts the stride of an axis of size 1, which is arbitrary.
_LEAST = 2


def lower_int_products(session: RewriteSession, target: Target) -> None:
    """Turn ``mm(int32(a), int32(b))`` of int8 operands into ``_int_mm(a, b)``, or log the reason.

    Normalize writes every integer matmul in 32 bits, which is correct on every machine; rules that
    match its scales rewrite it to a quantized linear. For the others int8 is several times faster.
    """
    program, stage = session.program, session.context.stage
    for node in list(program.graph.nodes):
        factors = _bytes_of(node)
        if factors is None:
            continue
        place = place_of(node)
        refusal = _check(factors, target, program.signature.symbols)
        if refusal is None:
            sizes = f"[{', '.join(map(str, shape_of(factors[1])))}]"
            event = Lowered(stage, place, INT_MM, f"int8 x int8 {sizes} -> int32")
            edit = partial(_multiply, node, factors)
            done = session.rewrite(
                "lower-int-product",
                node,
                edit,
                proof=Exactness.EXACT,
                event=partial(_always, event),
            )
            if isinstance(done, Applied):
                continue
        why = "not permitted" if refusal is None else refusal.reason
        text = f"an int8 product runs in 32 bits, several times slower: {why}"
        program.log.add(Noted(stage, text, place, warn=True))


def _always(event: Lowered, *_: object) -> Lowered:
    return event


def _multiply(node: Node, factors: tuple[Node, Node], rw: Rewriter) -> None:
    left, right = (_in_order(factor, rw) for factor in factors)
    rw.replace(node, rw.call(aten._int_mm.default, left, right))


def _bytes_of(node: Node) -> tuple[Node, Node] | None:
    """Return the int8 operands of a 32-bit matmul."""
    if not is_call(node, aten.mm.default) or dtype_of(node) is not torch.int32:
        return None
    a = arguments(node)
    left, right = _byte(node_of(a["self"])), _byte(node_of(a["mat2"]))
    return None if left is None or right is None else (left, right)


def _byte(node: Node) -> Node | None:
    if not is_call(node, aten._to_copy.default):
        return None
    source = node_of(arguments(node)["self"])
    # `aten._int_mm` takes int8 only.
    return source if dtype_of(source) is torch.int8 else None


def _check(
    factors: tuple[Node, Node], target: Target, symbols: Mapping[str, SymbolRange]
) -> Refusal | None:
    refusal = int_mm_refusal(target)
    if refusal is not None:
        return refusal
    sizes = (*shape_of(factors[0]), *shape_of(factors[1]))
    if min(size_range(size, symbols).low for size in sizes) < _LEAST:
        return Refusal("torch._int_mm returns garbage when a size is 1, and one may be")
    return None


def _in_order(factor: Node, rw: Rewriter) -> Node:
    """Copy an operand that is dense along neither axis: ``_int_mm`` reads it incorrectly."""
    strides = tensor_of(factor).stride()
    sizes = shape_of(factor)
    dense = any(
        same_size(strides[inner], 1) and same_size(strides[1 - inner], sizes[inner])
        for inner in (0, 1)
    )
    return factor if dense else rw.call(aten.contiguous.default, factor)
