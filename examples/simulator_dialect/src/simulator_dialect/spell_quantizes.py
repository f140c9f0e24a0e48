"""Canonical quantizes as the simulator's."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch._ops import OpOverload
from torch.fx import Node

from qfuse.ir.events import Exactness, MissCode
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.qdq import Choose, Quantize, as_choose, as_quantize
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.element import ScaleFormat
from qfuse.ir.quant.spec import Block, QuantSpec
from qfuse.normalize.importers.qparams import without_reshapes
from qfuse.rewrite.rewriter import Rewriter
from qfuse.rewrite.rule import Miss, Rule
from simulator_dialect.ops import EPS
from simulator_dialect.quantizes import DIVIDE, MAX_BITS, mxfp4, mxfp4_choice

sim = torch.ops.simulator
_FORMULAS = (
    (Formula.AO_SYMMETRIC, sim.dynamic_quantize_symmetric.default),
    (Formula.AO_ASYMMETRIC, sim.dynamic_quantize_asymmetric.default),
)


@dataclass(frozen=True, slots=True)
class SpellStaticSite:
    """A quantize with given parameters, and its number of bits."""

    quantize: Quantize
    bits: int


class SpellStaticQuantize(Rule[SpellStaticSite]):
    """``qfuse.quantize`` with one scale and zero point becomes ``simulator.quantize``.

    Refuses: any other granularity, range or arithmetic; parameters with axes that a view does not
    take away.
    """

    name = "spell-simulator-static-quantize"
    anchors: ClassVar[tuple[OpOverload, ...]] = (ops.quantize,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> SpellStaticSite | Miss:
        """Match a quantize with one scale and one zero point."""
        quantize = as_quantize(node)
        assert quantize is not None, "the anchor is a quantize"
        params, spec = quantize.params, quantize.params.spec
        bits = (spec.quant_max + 1).bit_length()
        half = 2 ** (bits - 1)
        plain = QuantSpec(torch.int8, -half, half - 1, (None,) * spec.rank, arithmetic=DIVIDE)
        if spec != plain or not 1 < bits <= MAX_BITS:
            text = "the simulator does not quantize to {}"
            return Miss(MissCode.GRANULARITY, node, text, spec, progress=3)
        for param in (params.scale, params.zero_point):
            if param is None or not _is_scalar(param):
                text = "the simulator takes one scale and one zero point, without axes"
                return Miss(MissCode.SHAPE, node, text, progress=3)
        if dtype_of(params.scale) is not torch.float32:
            return Miss(MissCode.DTYPE, params.scale, "its scale is not float32", progress=3)
        return SpellStaticSite(quantize, bits)

    def rewrite(self, site: SpellStaticSite, rw: Rewriter) -> None:
        """Take the axes of the parameters away, and call the op."""
        params = site.quantize.params
        assert params.zero_point is not None, "the match has seen to it"
        scale, zero = _scalar(rw, params.scale), _scalar(rw, params.zero_point)
        made = rw.call(sim.quantize.default, site.quantize.x, scale, zero, site.bits)
        rw.replace(site.quantize.node, made)


@dataclass(frozen=True, slots=True)
class DynamicKind:
    """One of the ops that choose parameters.

    Attributes:
        op: The op.
        argument: The axes that share one scale, or the size of groups.
        spec: How it quantizes.
    """

    op: OpOverload
    argument: list[int] | int
    spec: QuantSpec


@dataclass(frozen=True, slots=True)
class SpellDynamicSite:
    """A choice of parameters, the quantize that reads it, and where its results are read.

    Attributes:
        choose: The choice.
        quantize: The quantize with its results.
        results: The nodes of scale and zero point, each with its position in the op's result.
        kind: The op that they become.
    """

    choose: Choose
    quantize: Quantize
    results: tuple[tuple[int, Node], ...]
    kind: DynamicKind


class SpellDynamicQuantize(Rule[SpellDynamicSite]):
    """A choice of parameters and the quantize that reads it become one dynamic quantize.

    Refuses: any other formula or arithmetic; blocks that none of the ops has; parameters that are
    read by several quantizes or none, or changed on the way.
    """

    name = "spell-simulator-dynamic-quantize"
    anchors: ClassVar[tuple[OpOverload, ...]] = (ops.choose_qparams,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> SpellDynamicSite | Miss:
        """Match a choice of which one quantize of the same value reads the results."""
        choose = as_choose(node)
        assert choose is not None, "the anchor is a choice of parameters"
        kind = _kind(choose.spec)
        if kind is None:
            text = "the simulator does not choose parameters as {} does"
            return Miss(MissCode.GRANULARITY, node, text, choose.spec, progress=3)
        given = {int(u.args[1]): u for u in node.users if u.target is operator.getitem}  # type: ignore[arg-type]
        asymmetric = kind.op is sim.dynamic_quantize_asymmetric.default
        quantizes = _quantizes(choose, kind.spec, given, asymmetric=asymmetric)
        if len(quantizes) != 1 or (not asymmetric and 1 in given):
            text = "its parameters are not read by one quantize of the same value"
            return Miss(MissCode.SHARED, node, text, progress=3)
        results = tuple((index + 1, result) for index, result in given.items())
        return SpellDynamicSite(choose, quantizes[0], results, kind)

    def rewrite(self, site: SpellDynamicSite, rw: Rewriter) -> None:
        """Call the op, and hand out its results."""
        made = rw.call(site.kind.op, site.choose.x, site.kind.argument)
        rw.replace(site.quantize.node, rw.item(made, 0))
        for index, result in site.results:
            if result.users:
                rw.replace(result, rw.item(made, index))


def chosen_spec(formula: Formula, block: Block) -> ChooseSpec:
    """Return how the simulator chooses parameters in int8."""
    return ChooseSpec(formula, torch.int8, -128, 127, block, EPS, torch.float32, torch.int8)


def _kind(choose: ChooseSpec) -> DynamicKind | None:
    """Return the op that chooses parameters like this."""
    block = choose.block
    group = block[-1]
    if group is not None and choose == mxfp4_choice((*(1,) * (len(block) - 1), group)):
        op = sim.dynamic_quantize_mxfp4.default
        return DynamicKind(op, group, mxfp4(block, ScaleFormat.E8M0))
    if not set(block) <= {1, None}:
        return None
    dims = [axis for axis, size in enumerate(block) if size is None]
    spec = QuantSpec(torch.int8, -128, 127, block, arithmetic=DIVIDE)
    for formula, packet in _FORMULAS:
        if choose == chosen_spec(formula, block):
            return DynamicKind(packet, dims, spec)
    return None


def _quantizes(
    choose: Choose, spec: QuantSpec, given: dict[int, Node], *, asymmetric: bool
) -> list[Quantize]:
    """Return the quantizes of the chosen-for value with the chosen parameters, each once."""
    found: dict[Node, Quantize] = {}
    for user in given[0].users if 0 in given else ():
        quantize = as_quantize(user)
        if quantize is None or quantize.x is not choose.x or quantize.params.spec != spec:
            continue
        zero = given.get(1) if asymmetric else None
        if quantize.params.scale is given[0] and quantize.params.zero_point is zero:
            found[user] = quantize
    return list(found.values())


def _is_scalar(param: Node) -> bool:
    constant = constant_of(param)
    if constant is not None:
        return constant.numel() == 1
    return not shape_of(without_reshapes(param, ()))


def _scalar(rw: Rewriter, param: Node) -> Node:
    constant = constant_of(param)
    if constant is None:
        return without_reshapes(param, ())
    return param if not shape_of(param) else rw.constant(constant.reshape(()), str(param.target))
