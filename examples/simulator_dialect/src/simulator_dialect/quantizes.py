"""Rules for the simulator's quantize ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch._ops import OpOverload
from torch.fx import Node

from qfuse.ir.events import Exactness, MissCode
from qfuse.ir.graph.schema import arguments
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.views import dtype_of, node_of, shape_of
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.element import CONTAINER, Element, ScaleFormat
from qfuse.ir.quant.spec import Arithmetic, Block, QuantSpec, ZeroPointDomain, stored_range
from qfuse.normalize.importers.choose import used_results
from qfuse.normalize.importers.qparams import Param
from qfuse.normalize.importers.rule import RefusedError, SourceRule
from qfuse.rewrite.rewriter import Rewriter
from qfuse.rewrite.rule import Miss, Rule
from simulator_dialect.ops import EPS

# The simulator divides by the scale, in the type of the data.
DIVIDE = Arithmetic(torch.float32, reciprocal=False)
MAX_BITS = 8


def mxfp4(block: Block, scale: ScaleFormat = ScaleFormat.FLOAT) -> QuantSpec:
    """Return the spec of fp4 numbers in blocks."""
    codes = stored_range(CONTAINER, Element.E2M1)
    return QuantSpec(
        CONTAINER,
        *codes,
        block,
        arithmetic=DIVIDE,
        domain=ZeroPointDomain.NONE,
        element=Element.E2M1,
        scale_format=scale,
    )


def mxfp4_choice(block: Block) -> ChooseSpec:
    """Return how the simulator chooses powers of two."""
    codes = stored_range(CONTAINER, Element.E2M1)
    dtype = ScaleFormat.E8M0.dtype
    assert dtype is not None, "it is the type of such scales"
    formula, element = Formula.MX_FLOOR, Element.E2M1
    return ChooseSpec(formula, CONTAINER, *codes, block, 0.0, dtype, element=element)


@dataclass(frozen=True, slots=True)
class StaticSite:
    """A quantize with given parameters."""

    node: Node
    x: Node
    scale: Node
    zero_point: Node
    spec: QuantSpec


class StaticQuantize(Rule[StaticSite]):
    """``simulator.quantize(x, scale, zero_point, bits)`` becomes ``qfuse.quantize``.

    Refuses: data or a scale that is not float32, since torch would compute in another type; a
    scale that is not one number without axes; more bits than a byte has.
    """

    name = "simulator-static-quantize"
    anchors: ClassVar[tuple[OpOverload, ...]] = (torch.ops.simulator.quantize.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> StaticSite | Miss:
        """Match a call whose arithmetic is float32."""
        a = arguments(node)
        x, scale, zero = node_of(a["x"]), node_of(a["scale"]), node_of(a["zero_point"])
        bits = a["bits"]
        if not isinstance(bits, int) or not 1 < bits <= MAX_BITS:
            return Miss(MissCode.RANGE, node, "{} bits do not fit in a byte", bits)
        for param in (x, scale):
            if dtype_of(param) is not torch.float32:
                return Miss(MissCode.DTYPE, param, "it computes in {}", dtype_of(param))
        if dtype_of(zero).is_floating_point:
            return Miss(MissCode.ZERO_POINT, zero, "the zero point is {}", dtype_of(zero))
        if shape_of(scale) or shape_of(zero):
            return Miss(MissCode.SHAPE, node, "it has more than one scale: {}", shape_of(scale))
        half = 2 ** (bits - 1)
        block = (None,) * len(shape_of(x))
        spec = QuantSpec(torch.int8, -half, half - 1, block, arithmetic=DIVIDE)
        return StaticSite(node, x, scale, zero, spec)

    def rewrite(self, site: StaticSite, rw: Rewriter) -> None:
        """Give the parameters the rank of the data."""
        shape = (1,) * site.spec.rank
        given = (site.scale, site.zero_point)
        scale, zero = (Param(node, shape, dtype_of(node)).build(rw, node.name) for node in given)
        rw.replace(site.node, rw.call(ops.quantize, site.x, scale, zero, str(site.spec)))


@dataclass(frozen=True, slots=True)
class DynamicSite:
    """A quantize that chooses its parameters, and who reads which of its results."""

    x: Node
    choose: ChooseSpec
    spec: QuantSpec
    results: tuple[tuple[int, Node], ...]


class DynamicQuantizeMxfp4(SourceRule[DynamicSite]):
    """``dynamic_quantize_mxfp4(x, group)`` becomes a choice and a quantize.

    Refuses: data that is not float32; a last axis that is not a multiple of the group, or dynamic.
    """

    name = "simulator-dynamic-quantize-mxfp4"
    anchors: ClassVar[tuple[OpOverload, ...]] = (
        torch.ops.simulator.dynamic_quantize_mxfp4.default,
    )

    def read(self, node: Node) -> DynamicSite:
        """Read a call."""
        a = arguments(node)
        x, group = node_of(a["x"]), a["group"]
        if dtype_of(x) is not torch.float32:
            raise RefusedError(MissCode.DTYPE, x, "it computes in {}", dtype_of(x))
        size = shape_of(x)[-1]
        if not isinstance(group, int) or not isinstance(size, int) or size % group:
            text = "an axis of {} is not known to be groups of {}"
            raise RefusedError(MissCode.SHAPE, node, text, size, group)
        block = (*(1,) * (len(shape_of(x)) - 1), group)
        spec = mxfp4(block, ScaleFormat.E8M0)
        return DynamicSite(x, mxfp4_choice(block), spec, used_results(node, 2))

    def rewrite(self, site: DynamicSite, rw: Rewriter) -> None:
        """Choose, quantize, and hand out the results."""
        _hand_out(site, rw, zero_point=False)


class DynamicQuantize(SourceRule[DynamicSite]):
    """``dynamic_quantize_(a)symmetric(x, dims)`` becomes a choice and a quantize.

    Refuses: data that is not float32; dims that are none, with which torch reduces all of them.
    """

    name = "simulator-dynamic-quantize"
    anchors: ClassVar[tuple[OpOverload, ...]] = (
        torch.ops.simulator.dynamic_quantize_symmetric.default,
        torch.ops.simulator.dynamic_quantize_asymmetric.default,
    )

    def read(self, node: Node) -> DynamicSite:
        """Read a call."""
        a = arguments(node)
        x, dims = node_of(a["x"]), a["dims"]
        if dtype_of(x) is not torch.float32:
            raise RefusedError(MissCode.DTYPE, x, "it computes in {}", dtype_of(x))
        if not isinstance(dims, (list, tuple)) or not dims:
            raise RefusedError(MissCode.AXIS, node, "it reduces no axis: {}", dims)
        rank = len(shape_of(x))
        whole = {dim % rank for dim in dims if isinstance(dim, int)}
        block = tuple(None if axis in whole else 1 for axis in range(rank))
        symmetric = node.target is self.anchors[0]
        formula = Formula.AO_SYMMETRIC if symmetric else Formula.AO_ASYMMETRIC
        choose = ChooseSpec(formula, torch.int8, -128, 127, block, EPS, torch.float32, torch.int8)
        spec = QuantSpec(torch.int8, -128, 127, block, arithmetic=DIVIDE)
        return DynamicSite(x, choose, spec, used_results(node, 2 if symmetric else 3))

    def rewrite(self, site: DynamicSite, rw: Rewriter) -> None:
        """Choose, quantize, and hand out the results."""
        _hand_out(site, rw, zero_point=site.choose.formula is not Formula.AO_SYMMETRIC)


def _hand_out(site: DynamicSite, rw: Rewriter, *, zero_point: bool) -> None:
    """Choose, quantize, and replace every result for its users."""
    chosen = rw.call(ops.choose_qparams, site.x, str(site.choose))
    scale = rw.item(chosen, 0)
    zero = rw.item(chosen, 1) if zero_point else None
    made = (rw.call(ops.quantize, site.x, scale, zero, str(site.spec)), scale, zero)
    for index, old in site.results:
        new = made[index]
        assert new is not None, "a symmetric quantize has two results"
        rw.replace(old, new)
