"""Random quantization in blocks with narrow scales, of one level and of two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from hypothesis import strategies as st
from torch.fx import Node

from qfuse.ir.ops import library as ops
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.element import CONTAINER, Element, ScaleFormat
from qfuse.ir.quant.spec import Arithmetic, Block, QuantSpec, ZeroPointDomain, stored_range
from qfuse.ir.sizes import Size

if TYPE_CHECKING:
    from tests.support.strategies.grower import Grower

KINDS = [
    (CONTAINER, Element.E2M1),
    (CONTAINER, Element.WHOLE),
    (CONTAINER, Element.E2M3),
    (CONTAINER, Element.E3M2),
    (torch.float8_e5m2, Element.WHOLE),
    (torch.int8, Element.WHOLE),
]
_FORMULAS = [Formula.MX_FLOOR, Formula.MX_RCEIL, Formula.MX_EVEN, Formula.MX_CEIL]


@st.composite
def mx_specs(
    draw: st.DrawFn,
    block: Block,
    float_dtype: torch.dtype = torch.float32,
    outer: Block | None = None,
) -> QuantSpec:
    """Any spec with these blocks; with two levels, the scales are those of NVFP4."""
    dtype, element = draw(st.sampled_from(KINDS[:1] if outer is not None else KINDS))
    low, high = stored_range(dtype, element)
    if draw(st.integers(0, 3)) == 3:
        low, high = low + 1, high - 1
    form = ScaleFormat.E8M0 if outer is None else ScaleFormat.E4M3
    math = Arithmetic(reciprocal=draw(st.booleans()))
    none = ZeroPointDomain.NONE
    return QuantSpec(dtype, low, high, block, float_dtype, math, none, element, form, outer)


def mx_tensors(
    g: Grower, x: Node, sizes: Sequence[Size], float_dtype: torch.dtype
) -> tuple[QuantSpec, Node, Node | None]:
    """Choose spec, scale and second level of scales for a tensor, given or from its values."""
    dynamic = g.chance(2)
    block = g.block(sizes, dynamic=dynamic)
    whole: Block = (None,) * len(sizes)
    two = g.chance(2)
    outer = None
    if two:
        outer = whole if dynamic or g.chance(2) else g.block(sizes, dynamic=False)
    spec = g.draw(mx_specs(block, float_dtype, outer))
    return (spec, *_chosen(g, x, spec)) if dynamic else (spec, *_given(g, sizes, spec))


def _given(g: Grower, sizes: Sequence[Size], spec: QuantSpec) -> tuple[Node, Node | None]:
    grid = [int(n) for n in spec.grid(sizes)]
    codes = torch.tensor(
        g.draw(st.lists(st.sampled_from([125, 127, 124, 0, 254, 255]), min_size=1))
    )
    count = torch.Size(grid).numel()
    picked = codes.repeat(count)[:count].reshape(grid).to(torch.uint8)
    if spec.outer is None:
        return g.b.const(g.name("power"), picked.view(torch.float8_e8m0fnu)), None
    narrow = (picked.float() / 128 + 0.1).to(torch.float8_e4m3fn)
    outer_spec = spec.with_block(spec.outer, spec.outer)
    outer = g.scale([int(n) for n in outer_spec.grid(sizes)])
    return g.b.const(g.name("narrow"), narrow), outer


def _chosen(g: Grower, x: Node, spec: QuantSpec) -> tuple[Node, Node | None]:
    codes = spec.quant_min, spec.quant_max
    rest = (spec.dtype, *codes)
    if spec.outer is None:
        e8m0 = torch.float8_e8m0fnu
        choose = ChooseSpec(g.pick(_FORMULAS), *rest, spec.block, 0.0, e8m0, element=spec.element)
        return g.b.item(g.b.call(ops.choose_qparams, x, str(choose)), 0), None
    whole = ChooseSpec(Formula.NVFP4_OUTER, *rest, spec.outer, 0.0, element=spec.element)
    outer = g.b.item(g.b.call(ops.choose_qparams, x, str(whole)), 0)
    e4m3 = torch.float8_e4m3fn
    choose = ChooseSpec(
        Formula.NVFP4, *rest, spec.block, 0.015625, e4m3, element=spec.element, outer=True
    )
    return g.b.item(g.b.call(ops.choose_qparams, x, str(choose), outer), 0), outer
