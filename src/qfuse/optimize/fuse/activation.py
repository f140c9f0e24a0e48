"""Quantize what an activation gives in the pass that computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.activation import Activation
from qfuse.ir.ops.output import Keep, Output
from qfuse.ir.ops.qdq import Quantize, as_dequantize, as_quantize
from qfuse.ir.ops.views import QuantParams
from qfuse.optimize.fuse.match_gated import Gated, gated
from qfuse.optimize.fuse.quantized_output import (
    Kept,
    QuantizedResult,
    available,
    insertion_point,
    quantized_result,
    replace_results,
    results_like,
)
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule

_MUL = torch.ops.aten.mul.Tensor
_CAST = torch.ops.aten._to_copy.default
_STEPS = 8


@dataclass(frozen=True, slots=True)
class FuseActivationQuantizeSite:
    """An activation, perhaps times a gate, and the quantize that reads it.

    Attributes:
        fused: The op that both become; its node is the quantize.
        result: The quantize, and the choice of its parameters.
        kept: The float result, if others read it too.
        point: Where the op goes.
        values: Its (fake) results.
    """

    fused: Activation
    result: QuantizedResult
    kept: tuple[Kept, ...]
    point: Node
    values: list[torch.Tensor]


class FuseActivationQuantize(Rule[FuseActivationQuantizeSite]):
    """``quantize(act(g) * u)`` becomes ``qfuse.activation``, which reads ``g`` and ``u`` once.

    Before::

        g -> silu --.                .-- choose_qparams --.
                    +-- mul -- cast -+-- quantize ---------+-- reader
        u ----------'

    After::

        g, u -> qfuse.activation -- reader

    Parameters may be given or chosen. Halves of one tensor become the step ``glu`` of the whole; a
    dequantize in front is taken along; casts, and trips to stored numbers and back, stay where the
    source rounds; the float result is kept where others read it.

    Refuses: a clamp that is no activation; parameters that are computed from the result otherwise
    than by a choice for it; operands that broadcast, or are no floats; a value on the way that
    others read; strides that would change. Scales of two levels stay outside. An activation that
    only rounds on the way to a product is left to the quantize of the product. One that a linear
    has in its epilogue stays there, and the op chooses parameters for what the linear gives, with
    an activation or without, in the pass that uses them.
    """

    name = "fuse-activation-quantize"
    anchors: ClassVar[tuple[OpOverload, ...]] = (ops.quantize,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> FuseActivationQuantizeSite | Miss:
        """Match a quantize of an activation."""
        quantize = as_quantize(node)
        assert quantize is not None, "the anchor is a quantize"
        found = gated(quantize.x, node)
        if isinstance(found, Miss):
            return found
        product = _product_of(node)
        if product is not None:
            text = "{} takes it along"
            return Miss(MissCode.ORDER, product, text, op_name(product), progress=1)
        result = quantized_result(quantize)
        if isinstance(result, QuantizedResult) and not found.steps and result.choose is None:
            return Miss(MissCode.PATTERN, node, "there is nothing to compute", progress=0)
        return result if isinstance(result, Miss) else _site(found, result)

    def rewrite(self, site: FuseActivationQuantizeSite, rw: Rewriter) -> None:
        """Put the op where its results are first read, and let everybody read them."""
        with rw.before(site.point):
            args = available(site.fused.call_args(), site.point, rw)
            node = rw.replay(site.fused.overload, args, {}, site.values)
            replace_results(node, site.result, site.fused.output, site.kept, rw)


def _site(found: Gated, result: QuantizedResult) -> FuseActivationQuantizeSite | Miss:
    y, params = result.quantize.x, result.quantize.params
    own = Kept(Keep.FLOAT, y, frozenset(result.ends))
    # Without steps the float result is what the op reads, and others read that as they did.
    kept = (own,) if own.readers and found.steps else ()
    keep = frozenset(k.what for k in kept)
    chosen = None if result.choose is None else (params.spec, result.choose.spec)
    fused = Activation(
        result.quantize.node,
        *_edge(found.x),
        found.epilogue,
        found.extras,
        Output(params if chosen is None else None, chosen, keep),
    )
    args = fused.call_args()
    point = insertion_point(result, kept, args)
    if isinstance(point, Miss):
        return point
    values = results_like(fused.overload, args, result, kept)
    if isinstance(values, Miss):
        return values
    return FuseActivationQuantizeSite(fused, result, kept, point, values)


def _edge(x: Node) -> tuple[Node, QuantParams | None]:
    """Return what the op reads instead of ``x``; an edge has scales of one level."""
    dequantize = as_dequantize(x)
    if dequantize is None or dequantize.params.outer_scale is not None:
        return x, None
    return dequantize.q, dequantize.params


def _product_of(node: Node) -> Node | None:
    """Return the quantize of a product that takes this one along, as one of its steps."""
    between = (ops.dequantize, _MUL, _CAST)
    last = node
    for _ in range(_STEPS):
        readers = [user for user in last.users if not is_call(user, ops.choose_qparams)]
        if len(readers) != 1:
            return None
        (reader,) = readers
        quantize = as_quantize(reader)
        if quantize is not None:
            return reader if _takes(quantize, node) else None
        if not is_call(reader, *between):
            return None
        last = reader
    return None


def _takes(quantize: Quantize, node: Node) -> bool:
    """Whether the op of which ``quantize`` becomes a part computes ``node`` on the way."""
    found, result = gated(quantize.x, quantize.node), quantized_result(quantize)
    if isinstance(found, Miss) or isinstance(result, Miss):
        return False
    if isinstance(_site(found, result), Miss):
        return False
    ends, stack, seen = {found.x, *found.extras}, [quantize.x], {quantize.x}
    while stack:
        value = stack.pop()
        if value is node:
            return True
        if value not in ends:
            new = [source for source in value.all_input_nodes if source not in seen]
            seen.update(new)
            stack += new
    return False
