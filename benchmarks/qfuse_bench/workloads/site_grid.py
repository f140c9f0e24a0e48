"""Merge sites as models have them: every kind of linear, widths of Llama and BERT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.fx import Node

from qfuse.ir.aten import aten
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.ops import library as ops
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import per_channel, per_tensor, per_token, stored_like

ROWS = (1, 4, 32, 128, 512)


@dataclass(frozen=True, slots=True)
class Site:
    """Linears with the same input.

    Attributes:
        name: Whose they are.
        k: Input features.
        widths: Output features of each.
        leaves: The caller gets the results, whose strides must be those of separate tensors.
    """

    name: str
    k: int
    widths: tuple[int, ...]
    leaves: bool = False


SITES: Mapping[str, Site] = MappingProxyType(
    {
        site.name: site
        for site in (
            Site("bert-qkv", 768, (768, 768, 768)),
            Site("llama-qkv", 1024, (1024, 512, 512)),
            Site("llama-gate-up", 1024, (2816, 2816)),
            Site("llama-4096-qkv", 4096, (4096, 1024, 1024)),
            Site("llama-4096-gate-up", 4096, (11008, 11008)),
            Site("bert-qkv-out", 768, (768, 768, 768), leaves=True),
            Site("llama-gate-up-out", 1024, (2816, 2816), leaves=True),
        )
    }
)
"""By name; Llama's keys and values are of fewer heads than its queries. Where results leave, parts
of a wider one have to be copied: what is right there is another question."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How the linears are quantized.

    Attributes:
        activation: ``static`` or ``dynamic`` int8, or ``float``.
        weight: Whether weights are int8, with a scale per output feature.
        float_dtype: The float type.
    """

    activation: str
    weight: bool
    float_dtype: torch.dtype


_F32, _BF16 = torch.float32, torch.bfloat16

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "float f32": Kind("float", weight=False, float_dtype=_F32),
        "float bf16": Kind("float", weight=False, float_dtype=_BF16),
        "static int8 f32": Kind("static", weight=True, float_dtype=_F32),
        "static int8 bf16": Kind("static", weight=True, float_dtype=_BF16),
        "dynamic int8 f32": Kind("dynamic", weight=True, float_dtype=_F32),
        "dynamic int8 bf16": Kind("dynamic", weight=True, float_dtype=_BF16),
        "weight-only f32": Kind("float", weight=True, float_dtype=_F32),
        "weight-only bf16": Kind("float", weight=True, float_dtype=_BF16),
    }
)
"""By what tables call them."""


def site_graph(site: Site, kind: Kind, m: int | str) -> NormalGraph:
    """Build the linears of a site, each used by an op that supports any strides.

    Args:
        site: The widths.
        kind: How they are quantized.
        m: Rows of the input, or the name of a size that varies.
    """
    b = GraphBuilder()
    x = _input(b, site, kind, m)
    outs = []
    for index, n in enumerate(site.widths):
        bias = b.const(f"bias{index}", torch.randn(n, dtype=kind.float_dtype))
        y = b.call(aten.linear.default, x, _weight(b, kind, n, site.k, f"w{index}"), bias)
        if not site.leaves:
            # What reads the parts costs the same either way: one row of it stands for the rest.
            y = b.call(aten.neg.default, b.call(aten.slice.Tensor, y, 0, 0, 1))
        outs.append(y)
    return b.done(*outs)


def grid_inputs(site: Site, kind: Kind, m: int) -> list[torch.Tensor]:
    """Return inputs of a site for so many rows."""
    if kind.activation == "float":
        return [torch.randn(m, site.k).to(kind.float_dtype)]
    stored = stored_like(per_token(2), m, site.k)
    return [stored, torch.rand(m, 1) * 0.02 + 1e-2] if kind.activation == "dynamic" else [stored]


def _input(b: GraphBuilder, site: Site, kind: Kind, m: int | str) -> Node:
    if kind.activation == "float":
        return b.arg("x", kind.float_dtype, m, site.k)
    q = b.arg("q", torch.int8, m, site.k)
    if kind.activation == "dynamic":
        scale = b.arg("scale", torch.float32, m, 1)
        spec = per_token(2, float_dtype=kind.float_dtype)
    else:
        scale = b.const("scale", torch.full((1, 1), 0.013))
        spec = per_tensor(2, float_dtype=kind.float_dtype)
    return b.call(ops.dequantize, q, scale, None, str(spec))


def _weight(b: GraphBuilder, kind: Kind, n: int, k: int, name: str) -> Node:
    if not kind.weight:
        return b.const(name, torch.randn(n, k, dtype=kind.float_dtype))
    spec = per_channel(float_dtype=kind.float_dtype)
    scale = b.const(f"{name}_scale", torch.rand(n, 1) * 0.01 + 1e-3)
    return b.call(ops.dequantize, b.const(name, stored_like(spec, n, k)), scale, None, str(spec))
