"""Pad stored numbers with the stored form of the padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.cost.model import CostModel
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import Quantize, as_quantize
from qfuse.ir.ops.views import QuantParams, shape_of, tensor_of
from qfuse.ir.quant.block import covers
from qfuse.ir.quant.reference import quantize as quantize_reference
from qfuse.ir.quant.spec import dtype_name
from qfuse.optimize.match.memory_cost import passed, saved
from qfuse.optimize.match.pad import Pad, as_pad
from qfuse.optimize.propagate.lift_quantize import refuse_layout
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule


@dataclass(frozen=True, slots=True)
class LiftAbovePadSite:
    """A quantize, the padding that it reads, and the padding as a stored number."""

    quantize: Quantize
    pad: Pad
    code: int


class LiftAbovePad(Rule[LiftAbovePadSite]):
    """``quantize(pad(x, v), s)`` becomes ``pad(quantize(x, s), q(v))``.

    Before::

        x -> constant_pad_nd(v) -> quantize(s) -> ...

    After::

        x -> quantize(s) -> constant_pad_nd(q(v)) -> ...

    Refuses: parameters that are computed at run time, since ``q(v)`` is a number in the graph;
    blocks along a padded axis; blocks that store ``v`` as different numbers; float storage.
    """

    name = "lift-above-pad"
    anchors: ClassVar[tuple[OpOverload, ...]] = (ops.quantize,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> LiftAbovePadSite | Miss:
        """Match a quantize of a padding that all blocks store as one number."""
        quantize = as_quantize(node)
        assert quantize is not None, "the anchor is a quantize"
        pad = as_pad(quantize.x)
        if pad is None:
            return Miss(MissCode.PATTERN, node, "it does not quantize a padding", progress=0)
        params = quantize.params
        axis = pad.split_axis(params.spec.block)
        if axis is not None:
            text = "parameters in blocks of {} do not move above a padding of axis {}"
            told = params.spec.block_text(), axis
            return Miss(MissCode.GRANULARITY, pad.node, text, *told, progress=2)
        code = _code(params, pad.value, node)
        if isinstance(code, Miss):
            return code
        with torch.no_grad():
            q = torch.empty_like(tensor_of(pad.x), dtype=params.spec.dtype)
        made = pad.result(q)
        wrong = made if isinstance(made, Miss) else refuse_layout(node, made)
        return wrong or LiftAbovePadSite(quantize, pad, code)

    def gain(self, site: LiftAbovePadSite, cost: CostModel) -> float | None:
        """Compare padding real numbers with padding stored ones."""
        spec, pad = site.quantize.params.spec, site.pad
        before = [passed(pad.node, spec.real, spec.dtype)]
        if len(pad.node.users) == 1:
            before.append(passed(pad.node, spec.real, spec.real))
        after = [passed(pad.x, spec.real, spec.dtype), passed(pad.node, spec.dtype, spec.dtype)]
        return saved(cost, before, after)

    def rewrite(self, site: LiftAbovePadSite, rw: Rewriter) -> None:
        """Quantize what is padded, and pad that."""
        params = site.quantize.params
        block = tuple(
            None if covers(b, size) else b
            for b, size in zip(params.spec.block, shape_of(site.pad.node), strict=True)
        )
        spec = str(params.spec.with_block(block))
        q = rw.call(ops.quantize, site.pad.x, params.scale, params.zero_point, spec)
        rw.replace(site.quantize.node, site.pad.apply(rw, q, site.code))


def _code(params: QuantParams, value: float, node: Node) -> int | Miss:
    """Return the one number that every block stores ``value`` as."""
    spec = params.spec
    if spec.dtype.is_floating_point:
        return Miss(MissCode.DTYPE, node, "{} cannot be padded", dtype_name(spec.dtype), progress=2)
    if params.outer_scale is not None:
        text = "its scales have a second level"
        return Miss(MissCode.GRANULARITY, params.outer_scale, text, progress=2)
    scale = constant_of(params.scale)
    zero = None if params.zero_point is None else constant_of(params.zero_point)
    absent = params.zero_point is not None and zero is None
    if scale is None or absent or scale.is_meta or (zero is not None and zero.is_meta):
        text = "the parameters are computed at run time, the padding is a number"
        return Miss(MissCode.NOT_CONSTANT, params.scale, text, progress=3)
    one_each = spec.with_block((1,) * spec.rank)
    real = torch.full(scale.shape, value, dtype=spec.real)
    known = set(quantize_reference(real, scale, zero, one_each).flatten().tolist())
    if len(known) != 1:
        text = "the blocks store the padding as {} different numbers"
        return Miss(MissCode.GRANULARITY, params.scale, text, len(known), progress=3)
    return int(known.pop())
