"""Let a norm give its result quantized: the memory between the two is never written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.norms import FusedNorm, LayerNorm, RmsNorm
from qfuse.ir.ops.output import Keep, Output
from qfuse.ir.ops.qdq import as_quantize
from qfuse.ir.ops.views import shape_of
from qfuse.ir.sizes import same_shape
from qfuse.optimize.fuse.match_norm import Norm, norm_of
from qfuse.optimize.fuse.match_norm_parts import operands
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

_ADD = torch.ops.aten.add.Tensor


@dataclass(frozen=True, slots=True)
class FuseNormQuantizeSite:
    """A norm and the quantize of its result.

    Attributes:
        fused: The op that both become; its node is the quantize.
        result: The quantize, and the choice of its parameters.
        kept: What others read too, in the order of the results.
        point: Where the op goes.
        values: Its (fake) results.
    """

    fused: FusedNorm
    result: QuantizedResult
    kept: tuple[Kept, ...]
    point: Node
    values: list[torch.Tensor]


class FuseNormQuantize(Rule[FuseNormQuantizeSite]):
    """``quantize(norm(x + r))`` becomes one op, for RMS and layer norms in all their spellings.

    Before::

        x, r -> add -> pow -> mean -> add -> rsqrt --.
                 `--------------------------------> mul -> mul -> (choose_qparams) -> quantize

    After::

        x, r, weight -> qfuse.rms_norm -> stored numbers (, scale, zero point, result, sum)

    What others read too, of the result and of the sum, the op gives besides. The spelling travels
    as a :class:`~qfuse.ir.ops.norm_spec.NormSpec`, so that it gives the same bits.

    Refuses: a norm that is spelled in a way that no spec says; a part of the norm that others read;
    parameters that are computed from the norm otherwise than by a choice for it; operands that are
    computed only after somebody has read what the op gives; strides that would change.
    """

    name = "fuse-norm-quantize"
    anchors: ClassVar[tuple[OpOverload, ...]] = (ops.quantize,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> FuseNormQuantizeSite | Miss:
        """Match a quantize of a norm."""
        quantize = as_quantize(node)
        assert quantize is not None, "the anchor is a quantize"
        norm = norm_of(quantize.x)
        if isinstance(norm, Miss):
            return norm
        result = quantized_result(quantize)
        if isinstance(result, Miss):
            return result
        shared = _refuse_shared(norm)
        if shared is not None:
            return shared
        plain = _site(norm, result, None)
        added = _summands(norm.x)
        if added is None:
            return plain
        # The sum may be read before other operands are there; then it stays where it is.
        site = _site(norm, result, added)
        return plain if isinstance(site, Miss) else site

    def rewrite(self, site: FuseNormQuantizeSite, rw: Rewriter) -> None:
        """Put the op where its results are first read, and let everybody read them."""
        with rw.before(site.point):
            args = available(site.fused.call_args(), site.point, rw)
            node = rw.replay(site.fused.overload, args, {}, site.values)
            replace_results(node, site.result, site.fused.output, site.kept, rw)


def _site(
    norm: Norm, result: QuantizedResult, added: tuple[Node, Node] | None
) -> FuseNormQuantizeSite | Miss:
    kept = _kept(norm, result, added)
    output = result.block(frozenset(k.what for k in kept))
    fused = _fused(norm, result, added, output)
    args = fused.call_args()
    point = insertion_point(result, kept, args)
    if isinstance(point, Miss):
        return point
    values = results_like(fused.overload, args, result, kept)
    if isinstance(values, Miss):
        return values
    return FuseNormQuantizeSite(fused, result, kept, point, values)


def _kept(norm: Norm, result: QuantizedResult, added: tuple[Node, Node] | None) -> tuple[Kept, ...]:
    """Return what others read too, in the order of the output block."""
    possible = [Kept(Keep.FLOAT, norm.node, frozenset(result.ends))]
    if added is not None:
        possible.append(Kept(Keep.SUM, norm.x, norm.dying()))
    return tuple(k for k in possible if k.readers)


def _fused(
    norm: Norm, result: QuantizedResult, added: tuple[Node, Node] | None, output: Output
) -> FusedNorm:
    node = result.quantize.node
    x, residual = (norm.x, None) if added is None else added
    if norm.layer:
        return LayerNorm(node, x, residual, norm.weight, norm.bias, norm.spec, output)
    return RmsNorm(node, x, residual, norm.weight, norm.spec, output)


def _summands(x: Node) -> tuple[Node, Node] | None:
    """Return the summands of a residual sum: neither is scaled or broadcast."""
    if not is_call(x, _ADD) or not operands(x):
        return None
    left, right = operands(x)[0]
    return (left, right) if same_shape(shape_of(left), shape_of(right)) else None


def _refuse_shared(norm: Norm) -> Miss | None:
    dying = norm.dying()
    for node in norm.inner:
        others = sorted({op_name(user) for user in node.users if user not in dying})
        if others:
            text = "a part of the norm, {}, is also read by {}"
            told = op_name(node), ", ".join(others)
            return Miss(MissCode.SHARED, node, text, *told, progress=4)
    return None
