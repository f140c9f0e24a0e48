"""Pad stored numbers where the padding is what one of them stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.graph.stage_graph import constant_of, op_name
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import Dequantize, as_dequantize
from qfuse.ir.ops.views import QuantParams, bits_equal, tensor_of
from qfuse.ir.quant.reference import dequantize as dequantize_reference
from qfuse.ir.quant.spec import ZeroPointDomain
from qfuse.optimize.match.pad import Pad, as_pad
from qfuse.optimize.propagate.sink_dequantize import refuse_sunk
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule, aten


@dataclass(frozen=True, slots=True)
class SinkBelowPadSite:
    """A padding, the dequantize that it reads, and the padding as a stored number."""

    dequantize: Dequantize
    pad: Pad
    code: int


class SinkBelowPad(Rule[SinkBelowPadSite]):
    """``pad(dequantize(q, s), v)`` becomes ``dequantize(pad(q, c), s)``, if ``c`` stands for ``v``.

    Before::

        q -> dequantize(s) -> constant_pad_nd(v) -> ...

    After::

        q -> constant_pad_nd(c) -> dequantize(s) -> ...

    Refuses: a number that no stored one stands for to the last bit; several blocks; parameters
    that are computed at run time; a dequantize that something else reads too.
    """

    name = "sink-below-pad"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.constant_pad_nd.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> SinkBelowPadSite | Miss:
        """Match a padding of a dequantize with a number that can be stored."""
        pad = as_pad(node)
        dequantize = None if pad is None else as_dequantize(pad.x)
        if pad is None or dequantize is None:
            return Miss(MissCode.PATTERN, node, "it does not pad a dequantize", progress=0)
        for user in dequantize.node.users:
            if user is not node:
                text = "its dequantize is also read by {}"
                return Miss(MissCode.SHARED, dequantize.node, text, op_name(user), progress=2)
        code = _code(dequantize.params, pad.value, node)
        if isinstance(code, Miss):
            return code
        made = pad.result(tensor_of(dequantize.q))
        wrong = made if isinstance(made, Miss) else refuse_sunk(node, made)
        return wrong or SinkBelowPadSite(dequantize, pad, code)

    def rewrite(self, site: SinkBelowPadSite, rw: Rewriter) -> None:
        """Pad the stored numbers, and dequantize that."""
        params = site.dequantize.params
        q = site.pad.apply(rw, site.dequantize.q, site.code)
        spec = str(params.spec.with_block((None,) * params.spec.rank))
        real = rw.call(ops.dequantize, q, params.scale, params.zero_point, spec)
        rw.replace(site.pad.node, real)


def _code(params: QuantParams, value: float, node: Node) -> int | Miss:
    """Return the stored number that ``value`` is the real form of, to the last bit."""
    spec = params.spec
    if params.outer_scale is not None:
        text = "its scales have a second level"
        return Miss(MissCode.GRANULARITY, params.outer_scale, text, progress=2)
    scale = constant_of(params.scale)
    zero = None if params.zero_point is None else constant_of(params.zero_point)
    absent = params.zero_point is not None and zero is None
    if scale is None or absent or scale.is_meta or (zero is not None and zero.is_meta):
        text = "the parameters are computed at run time, the padding is a number"
        return Miss(MissCode.NOT_CONSTANT, params.scale, text, progress=3)
    if scale.numel() != 1:
        text = "a padding of several blocks has several stored forms"
        return Miss(MissCode.GRANULARITY, params.scale, text, progress=3)
    code = _nearest(scale, zero, value, params)
    if code is not None:
        stored = torch.full(scale.shape, code, dtype=spec.dtype)
        real = dequantize_reference(stored, scale, zero, spec.with_block((None,) * spec.rank))
        if bits_equal(real, torch.full(scale.shape, value, dtype=spec.real)):
            return code
    text = "no stored number stands for {}"
    return Miss(MissCode.ZERO_POINT, node, text, value, progress=3)


def _nearest(
    scale: torch.Tensor, zero: torch.Tensor | None, value: float, params: QuantParams
) -> int | None:
    """Return the only stored number that ``value`` may be; ``None`` if there is none."""
    spec = params.spec
    if spec.dtype.is_floating_point or spec.domain is ZeroPointDomain.FLOAT_OFFSET:
        return None
    found = value / scale.double() + (0 if zero is None else zero.double())
    if not bool(found.isfinite()):
        return None
    code = round(found.item())
    return code if spec.quant_min <= code <= spec.quant_max else None
