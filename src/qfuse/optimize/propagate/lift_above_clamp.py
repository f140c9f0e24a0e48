"""A clamp before a quantize is the range of the quantize."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import Quantize, as_quantize
from qfuse.ir.ops.views import QuantParams, tensor_of
from qfuse.ir.quant.reference import quantize as quantize_reference
from qfuse.ir.quant.spec import QuantSpec, ZeroPointDomain
from qfuse.optimize.match.clamp import Clamp, as_clamp
from qfuse.optimize.match.dequant_table import known_params
from qfuse.optimize.propagate.lift_quantize import refuse_layout
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule


@dataclass(frozen=True, slots=True)
class LiftAboveClampSite:
    """A quantize, the clamp that it reads, and the range that means both."""

    quantize: Quantize
    clamp: Clamp
    spec: QuantSpec


class LiftAboveClamp(Rule[LiftAboveClampSite]):
    """``quantize(relu(x))`` becomes a quantize of ``x`` whose range begins at the zero point.

    Before::

        x -> clamp(a, b) -> quantize to [-128, 127] -> ...

    After::

        x -> quantize to [q(a), q(b)] -> ...

    Quantizing keeps the order of numbers, so cutting off before it and cutting off after it, at
    what the bounds become, are one. A rectifier is a clamp at zero, which the zero point stores.

    Refuses: a clamp that something else reads; parameters that are computed at run time, since the
    range is in the graph; blocks that store a bound as different numbers; scales that turn the
    order around; float storage.
    """

    name = "lift-above-clamp"
    anchors: ClassVar[tuple[OpOverload, ...]] = (ops.quantize,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> LiftAboveClampSite | Miss:
        """Match a quantize of a clamp that all blocks store alike."""
        quantize = as_quantize(node)
        assert quantize is not None, "the anchor is a quantize"
        clamp = as_clamp(quantize.x)
        if clamp is None:
            return Miss(MissCode.PATTERN, node, "it does not quantize a clamp", progress=0)
        for user in clamp.node.users:
            if not is_call(user, ops.quantize):
                text = "the clamp is also read by {}"
                return Miss(MissCode.SHARED, clamp.node, text, op_name(user), progress=2)
        codes = _codes(quantize.params, clamp)
        if isinstance(codes, Miss):
            return codes
        with torch.no_grad():
            q = torch.empty_like(tensor_of(clamp.x), dtype=quantize.params.spec.dtype)
        spec = replace(quantize.params.spec, quant_min=codes[0], quant_max=codes[1])
        wrong = refuse_layout(node, q, moves=False)
        return wrong or LiftAboveClampSite(quantize, clamp, spec)

    def rewrite(self, site: LiftAboveClampSite, rw: Rewriter) -> None:
        """Quantize what was cut off, to the smaller range."""
        params = site.quantize.params
        made = replace(params, spec=site.spec)
        rw.replace(site.quantize.node, rw.call(ops.quantize, *made.call_args(site.clamp.x)))


def _codes(params: QuantParams, clamp: Clamp) -> tuple[int, int] | Miss:
    """Return what all blocks store the least and the greatest number as that the clamp gives."""
    spec = params.spec
    offset = spec.domain is ZeroPointDomain.FLOAT_OFFSET
    if spec.dtype.is_floating_point or offset or not spec.is_plain:
        text = "a clamp is no range of {}"
        return Miss(MissCode.DTYPE, clamp.node, text, spec, progress=2)
    known = known_params(params)
    if isinstance(known, Miss):
        return known
    scale, zero = (None if value is None else value.reshape(1, -1) for value in known)
    assert scale is not None, "a quantize has a scale"
    if scale.numel() == 0 or not _keeps_order(scale, zero, spec):
        text = "a scale or zero point with which greater numbers are not stored as greater ones"
        return Miss(MissCode.RANGE, params.scale, text, progress=3)
    ends = torch.tensor([-torch.inf, torch.inf], dtype=spec.real, device=scale.device)
    cut = clamp(ends)[:, None].expand(2, scale.numel())
    codes = quantize_reference(cut, scale, zero, spec.with_block((None, 1)))
    if not bool((codes == codes[:, :1]).all()):
        text = "the blocks store the bounds of {} as different numbers"
        return Miss(MissCode.GRANULARITY, params.scale, text, op_name(clamp.node), progress=3)
    low, high = codes[:, 0].tolist()
    return low, high


def _keeps_order(scale: torch.Tensor, zero: torch.Tensor | None, spec: QuantSpec) -> bool:
    """Whether what numbers are multiplied with, and what is added, is positive and finite."""
    factor = scale.reciprocal() if spec.arithmetic.reciprocal else scale
    factor = factor.to(spec.arithmetic.compute)
    usual = bool(((factor > 0) & factor.isfinite()).all())
    return usual and (zero is None or bool(zero.to(spec.arithmetic.compute).isfinite().all()))
