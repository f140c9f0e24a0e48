"""A fused op in a few words, for people who read a table."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.linear import FusedLinear
from qfuse.ir.ops.views import QuantParams, dtype_of, shape_of
from qfuse.ir.quant.element import ScaleFormat
from qfuse.ir.quant.spec import Granularity, QuantSpec, dtype_name, stored_name
from qfuse.ir.sizes import Size
from qfuse.lower.kernel.operands import rows_share_scale


def describe(fused: FusedLinear, steps: str = "") -> str:
    """Say what a fused linear multiplies: ``int8 per-token dynamic x int8 per-channel``.

    Args:
        fused: The linear.
        steps: What is done to its result, if that is not its epilogue.
    """
    x = _edge(fused.x, fused.x_params, rows=Granularity.PER_TOKEN)
    weight = _edge(fused.weight, fused.weight_params, rows=Granularity.PER_CHANNEL)
    n, k = shape_of(fused.weight)
    text = f"{x} x {weight} [{n}, {k}]"
    steps = steps or str(fused.epilogue)
    if steps:
        text += f" | {steps}"
    if fused.out_params is not None:
        text += f" -> {dtype_name(fused.out_params.spec.dtype)}"
    return text


def _edge(value: Node, params: QuantParams | None, rows: Granularity) -> str:
    if params is None:
        return dtype_name(dtype_of(value))
    spec = params.spec
    name = stored_name(spec.dtype, spec.element)
    if not spec.is_full_range:
        name += f"[{spec.quant_min},{spec.quant_max}]"
    when = "" if constant_of(params.scale) is not None else " dynamic"
    zero = "" if params.zero_point is None else " asymmetric"
    granularity = granularity_of(spec, shape_of(value), rows)
    scales = "" if spec.scale_format is ScaleFormat.FLOAT else f" {spec.scale_format}"
    levels = "" if spec.outer is None else " two-level"
    return f"{name} {granularity}{scales}{levels}{when}{zero}"


def granularity_of(spec: QuantSpec, shape: Sequence[Size], rows: Granularity) -> Granularity:
    """Name the granularity; one scale per row is ``rows``: a token's, or a weight's channel's."""
    granularity = spec.granularity(shape)
    if rows_share_scale(spec.block, shape) and granularity is not Granularity.PER_TENSOR:
        return rows
    return granularity
