"""The other way round: canonical ops as ops of the simulator, for passes that give graphs back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch._ops import OpOverload
from torch.fx import Node

from qfuse.ir.events import Exactness, MissCode
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.linear import Linear, as_linear
from qfuse.ir.ops.qdq import as_dequantize, as_quantize
from qfuse.ir.ops.views import QuantParams, dtype_of, has_values, shape_of
from qfuse.ir.quant.element import Element, encode
from qfuse.ir.quant.spec import QuantSpec
from qfuse.optimize.match.strides import restride, stride_sensitive_user
from qfuse.rewrite.rewriter import Rewriter
from qfuse.rewrite.rule import Miss, Rule
from simulator_dialect.ops import pack_int4
from simulator_dialect.quantizes import DIVIDE, mxfp4

sim = torch.ops.simulator
_split = torch.ops.aten.split_with_sizes.default
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class SpellWeightOnlySite:
    """A float linear on a dequantized weight, and which of the simulator's linears it is."""

    linear: Linear
    weight: Node
    params: QuantParams
    kind: str


class SpellWeightOnlyLinear(Rule[SpellWeightOnlySite]):
    """A linear on a dequantized weight becomes ``int4_linear``, ``fp8_linear`` or ``mxfp4_linear``.

    Storage and block of the weight tell which. Weights are packed again.

    Refuses: a weight or a scale that is computed at run time; a weight that none of them has.
    """

    name = "spell-simulator-weight-only-linear"
    anchors: ClassVar[tuple[OpOverload, ...]] = (torch.ops.aten.linear.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> SpellWeightOnlySite | Miss:
        """Match a linear on a float input."""
        linear = as_linear(node)
        stored = None if linear is None else as_dequantize(linear.weight)
        if linear is None or stored is None or as_dequantize(linear.x) is not None:
            return Miss(MissCode.PATTERN, node, "it is not a weight-only linear", progress=0)
        if constant_of(stored.q) is None or constant_of(stored.params.scale) is None:
            return Miss(MissCode.NOT_CONSTANT, stored.q, "its weight is computed at run time")
        kind = _weight_kind(stored.params)
        if kind is None or dtype_of(linear.x) is not torch.float32:
            text = "the simulator has no linear on a weight of {}"
            return Miss(MissCode.DTYPE, stored.node, text, stored.params.spec, progress=3)
        if kind == "mxfp4" and not _has_exponents(stored.params.scale):
            text = "not all of its scales are powers of two"
            return Miss(MissCode.RANGE, stored.params.scale, text, progress=3)
        return SpellWeightOnlySite(linear, stored.q, stored.params, kind)

    def rewrite(self, site: SpellWeightOnlySite, rw: Rewriter) -> None:
        """Pack the weight and call the op."""
        weight, scale = constant_of(site.weight), constant_of(site.params.scale)
        assert weight is not None, "the match has seen to it"
        assert scale is not None, "the match has seen to it"
        name, x, bias = str(site.weight.target), site.linear.x, site.linear.bias
        if site.kind == "int4":
            group = site.params.spec.block[1] or weight.shape[1]
            packed = rw.constant(pack_int4(weight), f"{name}_packed")
            made = rw.call(sim.int4_linear.default, x, packed, site.params.scale, bias, group)
        elif site.kind == "fp8":
            row = rw.constant(scale.reshape(-1), f"{name}_row_scale")
            made = rw.call(sim.fp8_linear.default, x, site.weight, row, bias)
        else:
            codes = rw.constant(encode(weight, Element.E2M1), f"{name}_codes")
            exponent = rw.constant(_exponents(scale), f"{name}_exponents")
            made = rw.call(sim.mxfp4_linear.default, x, codes, exponent, bias)
        rw.replace(site.linear.node, made)


@dataclass(frozen=True, slots=True)
class SpellStaticLinearSite:
    """A linear with dequantized operands and a quantized result.

    Attributes:
        linear: The linear.
        x: Its stored input.
        given: Scale and zero point of the input.
        wanted: Scale and zero point of the output.
        quantizes: The quantizes of its parts, or of its result.
        sizes: Features of each part; ``None`` if it is not split.
    """

    linear: Linear
    x: Node
    given: tuple[float, int]
    wanted: tuple[float, int]
    quantizes: tuple[Node, ...]
    sizes: tuple[int, ...] | None


class SpellStaticLinear(Rule[SpellStaticLinearSite]):
    """A linear whose operands are dequantized and whose result is quantized is a static one.

    After a merge the result is split first. Then the op exists only if all parts are quantized in
    the same way.

    Refuses: parts that are quantized in different ways, or have float users; parameters that
    are not literals; anything but int8 with one scale per row of the weight.
    """

    name = "spell-simulator-static-linear"
    anchors: ClassVar[tuple[OpOverload, ...]] = (torch.ops.aten.linear.default,)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> SpellStaticLinearSite | Miss:
        """Match a linear on quantized values whose users all quantize."""
        linear = as_linear(node)
        x = None if linear is None else as_dequantize(linear.x)
        weight = None if linear is None else as_dequantize(linear.weight)
        if linear is None or x is None or weight is None:
            return Miss(MissCode.PATTERN, node, "it is not quantized on both sides", progress=0)
        given, row = _literals(x.params), _static_spec((1, None))
        if given is None or weight.params.spec != row or weight.params.zero_point is not None:
            text = "the simulator has no static linear with these operands"
            return Miss(MissCode.DTYPE, node, text, progress=2)
        quantizes, sizes = _results(node)
        wanted = [None if (q := as_quantize(n)) is None else _literals(q.params) for n in quantizes]
        first = wanted[0] if wanted else None
        if first is None or any(other != first for other in wanted):
            text = "its parts are not all quantized to int8 with one scale and zero point"
            return Miss(MissCode.GRANULARITY, node, text, progress=3)
        if sizes is not None and any(stride_sensitive_user(quantize) for quantize in quantizes):
            return Miss(MissCode.ORDER, node, "the strides of a part are relied upon", progress=3)
        return SpellStaticLinearSite(linear, x.q, given, first, tuple(quantizes), sizes)

    def rewrite(self, site: SpellStaticLinearSite, rw: Rewriter) -> None:
        """Call the op, and split its quantized values."""
        weight = as_dequantize(site.linear.weight)
        assert weight is not None, "the match has seen to it"
        scale = constant_of(weight.params.scale)
        assert scale is not None, "a merged weight has constant scales"
        row = rw.constant(scale.reshape(-1), f"{weight.params.scale.target}_row")
        bias = site.linear.bias
        args = (site.x, *site.given, weight.q, row, bias, *site.wanted)
        made = rw.call(sim.static_quant_linear.default, *args)
        if site.sizes is None:
            rw.replace(site.quantizes[0], made)
            return
        split = rw.call(_split, made, list(site.sizes), len(shape_of(made)) - 1)
        for index, quantize in enumerate(site.quantizes):
            restride(quantize, rw.item(split, index), rw)


def _static_spec(block: tuple[int | None, ...]) -> QuantSpec:
    return QuantSpec(torch.int8, -128, 127, block, arithmetic=DIVIDE)


def _weight_kind(params: QuantParams) -> str | None:
    spec = params.spec
    if params.zero_point is not None or dtype_of(params.scale) is not torch.float32:
        return None
    if spec.block[0] != 1 or spec.arithmetic != DIVIDE:
        return None
    if spec == QuantSpec(torch.int8, -8, 7, spec.block, arithmetic=DIVIDE):
        return "int4"
    if spec == mxfp4(spec.block):
        return "mxfp4"
    plain = spec.dtype in _FP8 and spec.block[1] is None and spec.element is Element.WHOLE
    return "fp8" if plain and spec.is_full_range else None


def _literals(params: QuantParams) -> tuple[float, int] | None:
    """Return scale and zero point of a per-tensor int8 op, if they are float64 literals."""
    spec, zero = params.spec, params.zero_point
    scale, zero_value = constant_of(params.scale), None if zero is None else constant_of(zero)
    if spec != _static_spec((None,) * spec.rank) or scale is None or zero_value is None:
        return None
    known = has_values(scale) and has_values(zero_value)
    if not known or scale.numel() != 1 or scale.dtype is not torch.float64:
        return None
    return float(scale.item()), int(zero_value.item())


def _results(node: Node) -> tuple[list[Node], tuple[int, ...] | None]:
    """Return what reads the result of a linear, or the parts that it is split in."""
    users = list(node.users)
    if len(users) != 1 or users[0].target is not _split:
        return users, None
    parts = sorted(users[0].users, key=lambda item: int(item.args[1]))  # type: ignore[arg-type]
    sizes: Sequence[int] = users[0].args[1]  # type: ignore[assignment]
    users = [user for part in parts for user in part.users]
    whole = len(parts) == len(sizes) == len(users)
    return (users, tuple(sizes)) if whole else ([], None)


def _exponents(scale: torch.Tensor) -> torch.Tensor:
    return (torch.frexp(scale).exponent - 1).clamp(-128, 127).to(torch.int8)


def _has_exponents(scale: Node) -> bool:
    """Whether scales are powers of two with exponents of a byte; without values they are."""
    factor = constant_of(scale)
    assert factor is not None, "only constants are asked about"
    return not has_values(factor) or torch.equal(_exponents(factor).float().exp2(), factor)
