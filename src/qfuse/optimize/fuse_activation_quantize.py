"""Quantize what an activation gives in the pass that computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from qfuse.ir import ops
from qfuse.ir.choose_spec import fixed_zero_point
from qfuse.ir.events import Exactness, MissCode
from qfuse.ir.fused import Keep
from qfuse.ir.fused_views import Activation, Output, result_of
from qfuse.ir.program import constant_of, op_name
from qfuse.ir.schema import is_call
from qfuse.ir.views import Choose, Quantize, as_choose, as_dequantize, as_quantize, tensor_of
from qfuse.optimize.gating import Gated, gated
from qfuse.rewrite.rule import Miss, Rule

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.fx import Node

    from qfuse.ir.views import QuantParams
    from qfuse.rewrite.rewriter import Rewriter

__all__ = ["ActivationQuantizeSite", "FuseActivationQuantize"]

_MUL = torch.ops.aten.mul.Tensor
_CAST = torch.ops.aten._to_copy.default


@dataclass(frozen=True, slots=True)
class ActivationQuantizeSite:
    """An activation, perhaps times a gate, and the quantize that reads it.

    Attributes:
        quantize: The quantize.
        choose: What chooses its parameters, if they are not given.
        gated: The activation.
        output: How the fused op gives its result.
    """

    quantize: Quantize
    choose: Choose | None
    gated: Gated
    output: Output


class FuseActivationQuantize(Rule[ActivationQuantizeSite]):
    """``quantize(act(g) * u)`` becomes ``qfuse.activation``, which reads ``g`` and ``u`` once.

    Before::

        g -> silu --.                .-- choose_qparams --.
                    +-- mul -- cast -+-- quantize ---------+-- reader
        u ----------'

    After::

        g, u -> qfuse.activation -- reader

    Parameters may be given or chosen. Halves of one tensor become the step ``glu`` of the whole; a
    dequantize in front is taken along; the float result is kept where others read it.

    Refuses: what is no activation, which the epilogue of a linear keeps; parameters that are
    computed from anything but the result; operands that broadcast, are no floats, or lie in memory
    in orders of their own; a value on the way that others read.
    """

    name = "fuse-activation-quantize"
    anchors: ClassVar[tuple[OpOverload, ...]] = (ops.quantize,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> ActivationQuantizeSite | Miss:
        """Match a quantize of an activation, with parameters that are constant or chosen for it."""
        quantize = as_quantize(node)
        assert quantize is not None, "the anchor is a quantize"
        choose = _choice(quantize)
        readers = {quantize.node} if choose is None else {quantize.node, choose.node}
        found = gated(quantize.x, node)
        if isinstance(found, Miss):
            return found
        product = _product_of(node)
        if product is not None:
            text = "{} takes it along"
            return Miss(MissCode.ORDER, product, text, op_name(product), progress=1)
        params, spec = quantize.params, quantize.params.spec
        keep = frozenset() if set(quantize.x.users) <= readers else frozenset({Keep.FLOAT})
        if choose is None:
            wrong = _refuse_params(params)
            return wrong or ActivationQuantizeSite(
                quantize, None, found, Output(params, None, keep)
            )
        if choose.spec.dtype != spec.dtype:
            text = "its parameters are chosen for {}, and it stores {}"
            return Miss(MissCode.DTYPE, node, text, choose.spec.dtype, spec.dtype, progress=3)
        return ActivationQuantizeSite(
            quantize, choose, found, Output(None, (spec, choose.spec), keep)
        )

    def rewrite(self, site: ActivationQuantizeSite, rw: Rewriter) -> None:
        """Replace the quantize, the choice, and the float result where it is read."""
        y, choose = site.quantize.x, site.choose
        # Right where the float result was: all of its operands are there, and nobody reads yet.
        with rw.before(y):
            fused = _fused(site, rw)
            rw.replace(site.quantize.node, rw.item(fused, 0))
            for user in [] if choose is None else list(choose.node.users):
                result = result_of(user)
                assert result is not None, "a choice is read by its results"
                rw.replace(user, rw.item(fused, 1 + result[1]))
            if Keep.FLOAT in site.output.keep:
                rw.replace(y, rw.item(fused, site.output.place(Keep.FLOAT)))


def _choice(quantize: Quantize) -> Choose | None:
    """Return what chooses the parameters of a quantize for the values that it reads."""
    scale = result_of(quantize.params.scale)
    choose = None if scale is None else as_choose(scale[0])
    if choose is None or scale != (choose.node, 0) or choose.x is not quantize.x:
        return None
    zero = quantize.params.zero_point
    if zero is None:
        return choose if fixed_zero_point(choose.spec) == 0 else None
    return choose if result_of(zero) == (choose.node, 1) else None


def _product_of(node: Node) -> Node | None:
    """Return the quantize of a product that rounds this result on the way, as one of its steps."""
    for kinds in ((ops.dequantize,), (_MUL, _CAST), (ops.quantize, _MUL, _CAST), (ops.quantize,)):
        (reader,) = node.users if len(node.users) == 1 else (None,)
        if reader is None or not is_call(reader, *kinds):
            return None
        if (quantize := as_quantize(reader)) is not None:
            return reader if isinstance(gated(quantize.x, reader), Gated) else None
        node = reader
    return None


def _refuse_params(params: QuantParams) -> Miss | None:
    for part in (params.scale, params.zero_point):
        if part is not None and constant_of(part) is None:
            text = "its scale or zero point is computed, and not chosen for the result alone"
            return Miss(MissCode.NOT_CONSTANT, part, text, progress=3)
    return None


def _fused(site: ActivationQuantizeSite, rw: Rewriter) -> Node:
    """Add the fused op. Its results are known: they are those of the ops that it stands for."""
    x, output = site.gated.x, site.output
    dequantize = as_dequantize(x)
    fused = Activation(
        site.quantize.node,
        x if dequantize is None else dequantize.q,
        None if dequantize is None else dequantize.params,
        site.gated.epilogue,
        site.gated.extras,
        output if output.params is None else _here(output, output.params, site.quantize.x, rw),
    )
    values = [tensor_of(site.quantize.node)]
    if site.choose is not None:
        values += site.choose.node.meta["val"]
    if output.keep:
        values.append(tensor_of(site.quantize.x))
    return rw.replay(ops.activation, fused.call_args(), {}, values)


def _here(output: Output, params: QuantParams, at: Node, rw: Rewriter) -> Output:
    """Return an output whose parameters, which are constants, come before ``at``."""

    def early(node: Node) -> Node:
        value = constant_of(node)
        assert value is not None, "given parameters are constants"
        return node if node < at else rw.constant(value, str(node.target))

    zero = params.zero_point
    moved = type(params)(params.spec, early(params.scale), None if zero is None else early(zero))
    return Output(moved, None, output.keep)
