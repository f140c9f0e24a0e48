"""A fused op in a few words, for people who read a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qfuse.ir.fused import Keep
from qfuse.ir.fused_views import Activation
from qfuse.ir.program import constant_of, op_name
from qfuse.ir.quant_spec import Granularity, dtype_name
from qfuse.ir.views import dtype_of, shape_of
from qfuse.lower.operands import rows_share_scale

if TYPE_CHECKING:
    from torch.fx import Node

    from qfuse.ir.fused_views import FusedNorm
    from qfuse.ir.views import FusedLinear, QuantParams

__all__ = ["describe", "describe_result"]


def describe(fused: FusedLinear) -> str:
    """Say what a fused linear multiplies: ``int8 per-token dynamic x int8 per-channel``."""
    x = _edge(fused.x, fused.x_params, rows=Granularity.PER_TOKEN)
    weight = _edge(fused.weight, fused.weight_params, rows=Granularity.PER_CHANNEL)
    n, k = shape_of(fused.weight)
    text = f"{x} x {weight} [{n}, {k}]"
    if fused.epilogue.steps:
        text += f" | {fused.epilogue}"
    if fused.out_params is not None:
        text += f" -> {dtype_name(fused.out_params.spec.dtype)}"
    return text


def describe_result(fused: FusedNorm | Activation) -> str:
    """Say what an op computes and how it gives it: ``rms_norm + quantize: float32 -> int8``."""
    output, shape = fused.output, shape_of(fused.x)
    if isinstance(fused, Activation):
        name = str(fused.epilogue)
    else:
        name = op_name(fused.node).removeprefix("qfuse.")
        name = name if fused.residual is None else f"add + {name}"
    given = dtype_name(fused.node.meta["val"][0].dtype)
    if output.spec is None:
        return f"{name}: {dtype_name(dtype_of(fused.x))} -> {given}"
    when = " dynamic" if output.choose is not None else ""
    kept = {Keep.FLOAT: "result", Keep.SUM: "sum"}
    besides = "".join(f", {kept[k]}" for k in Keep if k in output.keep)
    granularity = output.spec.granularity(shape)
    text = f"{name} + quantize: {dtype_name(dtype_of(fused.x))} -> {given} {granularity}{when}"
    return f"{text}{besides}"


def _edge(value: Node, params: QuantParams | None, rows: Granularity) -> str:
    if params is None:
        return dtype_name(dtype_of(value))
    spec = params.spec
    name = dtype_name(spec.dtype)
    if not spec.is_full_range:
        name += f"[{spec.quant_min},{spec.quant_max}]"
    when = "" if constant_of(params.scale) is not None else " dynamic"
    zero = "" if params.zero_point is None else " asymmetric"
    granularity = spec.granularity(shape_of(value))
    # One scale per row is a token's in an activation and a channel's in a weight.
    if rows_share_scale(spec.block, shape_of(value)) and granularity is not Granularity.PER_TENSOR:
        granularity = rows
    return f"{name} {granularity}{when}{zero}"
