"""Scales in formats of their own, and of two levels, for the tests of rules."""

from __future__ import annotations

from typing import Any

import torch
from tests.support.cases.propagate import Graph
from torch.fx import Node

from qfuse.ir.ops import library as ops
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.element import CONTAINER, Element, ScaleFormat
from qfuse.ir.quant.spec import Arithmetic, Block, QuantSpec, ZeroPointDomain

E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
NONE = ZeroPointDomain.NONE


def mx(*block: int | None, element: Element = Element.E2M1) -> QuantSpec:
    """A spec with powers of two."""
    low, high = (-448, 448) if element is Element.WHOLE else (-6, 6)
    return QuantSpec(
        CONTAINER, low, high, block, torch.float32, Arithmetic(), NONE, element, ScaleFormat.E8M0
    )


def nv(*block: int | None, outer: Block | None = None) -> QuantSpec:
    """A spec with scales of two levels, of which the second is the tensor's unless told."""
    whole: Block = (None,) * len(block) if outer is None else outer
    form, element = ScaleFormat.E4M3, Element.E2M1
    return QuantSpec(
        CONTAINER, -6, 6, block, torch.float32, Arithmetic(), NONE, element, form, whole
    )


def params(g: Graph, spec: QuantSpec, *shape: int) -> tuple[Any, ...]:
    """Constant scales and the text of the spec, as arguments."""
    grid = [int(n) for n in spec.grid(shape)]
    if spec.outer is None:
        scale = torch.randint(120, 130, grid).to(torch.uint8).view(E8M0)
        return g.constant(scale, "scale"), None, str(spec)
    scale = (torch.rand(grid) * 3 + 0.1).to(E4M3)
    sizes = [int(n) for n in spec.with_block(spec.outer, spec.outer).grid(shape)]
    outer = g.constant(torch.rand(sizes) * 0.3 + 0.1, "outer")
    return g.constant(scale, "scale"), None, str(spec), outer


def chosen(g: Graph, x: Node, spec: QuantSpec) -> tuple[Any, ...]:
    """Scales of both levels, chosen from the tensor."""
    rest = (CONTAINER, spec.quant_min, spec.quant_max)
    if spec.outer is None:
        choose = ChooseSpec(Formula.MX_RCEIL, *rest, spec.block, 0.0, E8M0, element=spec.element)
        return g.b.item(g.call(ops.choose_qparams, x, str(choose)), 0), None, str(spec)
    whole = ChooseSpec(Formula.NVFP4_OUTER, *rest, spec.outer, 0.0, element=spec.element)
    outer = g.b.item(g.call(ops.choose_qparams, x, str(whole)), 0)
    choose = ChooseSpec(
        Formula.NVFP4, *rest, spec.block, 0.015625, E4M3, element=spec.element, outer=True
    )
    scale = g.b.item(g.call(ops.choose_qparams, x, str(choose), outer), 0)
    return scale, None, str(spec), outer


def dequantized(g: Graph, spec: QuantSpec, *shape: int, real: Node | None = None) -> Node:
    """A quantize and dequantize of an input with constant scales."""
    x = (
        g.b.arg(f"y{len(list(g.b.module.graph.nodes))}", torch.float32, *shape)
        if real is None
        else real
    )
    args = params(g, spec, *shape)
    return g.call(ops.dequantize, g.call(ops.quantize, x, *args), *args)


SPECS = [mx(1, 32), nv(1, 16)]
