"""Rules for the simulator's linears: each is a float linear on dequantized operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch._ops import OpOverload
from torch.fx import Node

from qfuse.ir.events import Exactness, MissCode
from qfuse.ir.graph.schema import arguments
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.views import dtype_of, node_of, optional_node, shape_of, tensor_of
from qfuse.ir.quant.element import Element, decode
from qfuse.ir.quant.spec import QuantSpec, dtype_range
from qfuse.normalize.importers.qparams import Param
from qfuse.rewrite.rewriter import Rewriter
from qfuse.rewrite.rule import Miss, Rule
from simulator_dialect.ops import unpack_int4
from simulator_dialect.quantizes import DIVIDE, mxfp4


@dataclass(frozen=True, slots=True)
class WeightSite:
    """A linear with a quantized weight.

    Attributes:
        node: The source op.
        x: Its input.
        weight: Its weight.
        scale: The scale of the weight.
        bias: Its bias.
        spec: Quantization of the weight.
    """

    node: Node
    x: Node
    weight: Node
    scale: Node
    bias: Node | None
    spec: QuantSpec


class Int4Linear(Rule[WeightSite]):
    """``int4_linear`` becomes a float linear on a dequantized weight, unpacked ahead.

    Packing is a layout, not a meaning: kernels choose their own.

    Refuses: anything but float32; a weight that is not a constant, so that it cannot be unpacked
    ahead.
    """

    name = "simulator-int4-linear"
    anchors: ClassVar[tuple[OpOverload, ...]] = (torch.ops.simulator.int4_linear.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> WeightSite | Miss:
        """Match a call with a constant weight."""
        group = arguments(node)["group"]
        assert isinstance(group, int), f"the schema says so: {group!r}"
        return _weight_only(node, QuantSpec(torch.int8, -8, 7, (1, group), arithmetic=DIVIDE))

    def rewrite(self, site: WeightSite, rw: Rewriter) -> None:
        """Unpack the weight into a new constant."""
        packed = constant_of(site.weight)
        assert packed is not None, "the match has seen to it"
        q = rw.constant(unpack_int4(packed), f"{site.weight.target}_unpacked")
        real = rw.call(ops.dequantize, q, site.scale, None, str(site.spec))
        rw.replace(site.node, _linear(rw, site.x, real, site.bias))


class Fp8Linear(Rule[WeightSite]):
    """``fp8_linear`` becomes a float linear on a dequantized weight.

    Refuses: anything but float32; a weight that is not a constant.
    """

    name = "simulator-fp8-linear"
    anchors: ClassVar[tuple[OpOverload, ...]] = (torch.ops.simulator.fp8_linear.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> WeightSite | Miss:
        """Match a call with a constant weight."""
        dtype = dtype_of(node_of(arguments(node)["weight"]))
        spec = QuantSpec(dtype, *dtype_range(dtype), (1, None), arithmetic=DIVIDE)
        return _weight_only(node, spec)

    def rewrite(self, site: WeightSite, rw: Rewriter) -> None:
        """Give the scale the rank of the weight."""
        scale = _row_scale(rw, site.scale)
        real = rw.call(ops.dequantize, site.weight, scale, None, str(site.spec))
        rw.replace(site.node, _linear(rw, site.x, real, site.bias))


class Mxfp4Linear(Rule[WeightSite]):
    """``mxfp4_linear`` becomes a float linear on a dequantized float8 weight, unpacked ahead.

    Canonically an fp4 number is stored as a float8, zeros with their signs too. Every exponent of
    eight bits gives a float32 scale, so nothing is rounded.

    Refuses: anything but float32; a weight or exponents that are not constant.
    """

    name = "simulator-mxfp4-linear"
    anchors: ClassVar[tuple[OpOverload, ...]] = (torch.ops.simulator.mxfp4_linear.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> WeightSite | Miss:
        """Match a call with a constant weight."""
        a = arguments(node)
        x, weight, exponent = node_of(a["x"]), node_of(a["weight"]), node_of(a["exponent"])
        for part in (weight, exponent):
            if constant_of(part) is None:
                return Miss(MissCode.NOT_CONSTANT, part, "the weight is computed at run time")
        if dtype_of(x) is not torch.float32:
            return Miss(MissCode.DTYPE, x, "it computes in {}", dtype_of(x))
        group = int(shape_of(weight)[1]) // int(shape_of(exponent)[1])
        return WeightSite(node, x, weight, exponent, optional_node(a["bias"]), mxfp4((1, group)))

    def rewrite(self, site: WeightSite, rw: Rewriter) -> None:
        """Unpack the weight into new constants."""
        codes, exponent = constant_of(site.weight), constant_of(site.scale)
        assert codes is not None, "the match has seen to it"
        assert exponent is not None, "the match has seen to it"
        q = rw.constant(decode(codes, Element.E2M1), f"{site.weight.target}_unpacked")
        scale = rw.constant(exponent.float().exp2(), f"{site.scale.target}_scale")
        real = rw.call(ops.dequantize, q, scale, None, str(site.spec))
        rw.replace(site.node, _linear(rw, site.x, real, site.bias))


def _weight_only(node: Node, spec: QuantSpec) -> WeightSite | Miss:
    """Match a linear on a float input and a constant weight."""
    a = arguments(node)
    x, weight, scale = node_of(a["x"]), node_of(a["weight"]), node_of(a["scale"])
    if constant_of(weight) is None:
        return Miss(MissCode.NOT_CONSTANT, weight, "the weight is computed at run time")
    for param in (x, scale):
        if dtype_of(param) is not torch.float32:
            return Miss(MissCode.DTYPE, param, "it computes in {}", dtype_of(param))
    return WeightSite(node, x, weight, scale, optional_node(a["bias"]), spec)


@dataclass(frozen=True, slots=True)
class StaticSite:
    """A linear on quantized values.

    Attributes:
        linear: Its input, weight and bias.
        params: Scale and zero point of the input, and of the output.
    """

    linear: WeightSite
    params: tuple[tuple[float, int], tuple[float, int]]


class StaticQuantLinear(Rule[StaticSite]):
    """``static_quant_linear`` becomes what it stands for.

    Before::

        static_quant_linear(x, sx, zx, w, sw, b, sy, zy)

    After::

        quantize(linear(dequantize(x, sx, zx), dequantize(w, sw), b), sy, zy)

    which later becomes one op again, whichever kernel then runs it. Refuses: a scale of the weight
    or a bias that is not float32; parameters that are known only at run time.
    """

    name = "simulator-static-quant-linear"
    anchors: ClassVar[tuple[OpOverload, ...]] = (torch.ops.simulator.static_quant_linear.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> StaticSite | Miss:
        """Match a call whose parameters are numbers."""
        a = arguments(node)
        x, weight, scale = node_of(a["x"]), node_of(a["weight"]), node_of(a["weight_scale"])
        bias = optional_node(a["bias"])
        for param in (scale, *([] if bias is None else [bias])):
            if dtype_of(param) is not torch.float32:
                return Miss(MissCode.DTYPE, param, "it computes in {}", dtype_of(param))
        names = ("x_scale", "x_zero_point", "out_scale", "out_zero_point")
        numbers = [a[name] for name in names]
        if not all(isinstance(number, (int, float)) for number in numbers):
            return Miss(MissCode.NOT_CONSTANT, node, "its parameters are known only at run time")
        spec = QuantSpec(torch.int8, -128, 127, (1, None), arithmetic=DIVIDE)
        first, second, third, fourth = numbers
        params = ((float(first), int(second)), (float(third), int(fourth)))  # type: ignore[arg-type]
        return StaticSite(WeightSite(node, x, weight, scale, bias, spec), params)

    def rewrite(self, site: StaticSite, rw: Rewriter) -> None:
        """Dequantize both operands, multiply, quantize."""
        linear, (given, wanted) = site.linear, site.params
        rank = len(shape_of(linear.x))
        spec = linear.spec.with_block((None,) * rank)
        scale, zero = _literals(rw, linear.x, given, "x")
        x = rw.call(ops.dequantize, linear.x, scale, zero, str(spec))
        row_scale = _row_scale(rw, linear.scale)
        w = rw.call(ops.dequantize, linear.weight, row_scale, None, str(linear.spec))
        y = _linear(rw, x, w, linear.bias)
        scale, zero = _literals(rw, linear.node, wanted, "out")
        rw.replace(linear.node, rw.call(ops.quantize, y, scale, zero, str(spec)))


def _linear(rw: Rewriter, x: Node, weight: Node, bias: Node | None) -> Node:
    """Call ``aten.linear``, which takes no argument for a missing bias."""
    operands = (x, weight) if bias is None else (x, weight, bias)
    return rw.call(torch.ops.aten.linear.default, *operands)


def _row_scale(rw: Rewriter, scale: Node) -> Node:
    """Return one scale per row as a column: a new constant if it is one, else a view."""
    column = Param(scale, (*shape_of(scale), 1), dtype_of(scale))
    return column.build(rw, f"{scale.name}_column")


def _literals(rw: Rewriter, data: Node, params: tuple[float, int], what: str) -> tuple[Node, Node]:
    """Make constants of numbers, in the rank of ``data``: a literal is a float64."""
    fake = tensor_of(data)
    shape = (1,) * fake.ndim
    scale = torch.full(shape, params[0], dtype=torch.float64, device=fake.device)
    zero = torch.full(shape, params[1], dtype=torch.int64, device=fake.device)
    return rw.constant(scale, f"{what}_scale"), rw.constant(zero, f"{what}_zero_point")
