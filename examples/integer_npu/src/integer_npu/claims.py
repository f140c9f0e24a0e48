"""Which nodes become instructions: one function per op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from integer_npu.between import average_of, elementwise_of
from integer_npu.instruction import (
    Instruction,
    RefusedError,
    check_layout,
    check_sums,
    finish,
    integer_bias,
    steps_of,
)
from integer_npu.kernels import Array
from qfuse.ir.aten import aten
from qfuse.ir.graph.schema import arguments, overload_of
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.activation import as_activation
from qfuse.ir.ops.compact import CompactParams, compact_params
from qfuse.ir.ops.convolution import as_fused_convolution
from qfuse.ir.ops.epilogue import Act, Cast
from qfuse.ir.ops.linear import as_fused_linear
from qfuse.ir.ops.product import FusedProduct
from qfuse.ir.ops.qdq import as_requantize
from qfuse.ir.ops.views import QuantParams, dtype_of, shape_of
from qfuse.ir.quant.reference import dequantize, quantize
from qfuse.ir.refusal import Refusal
from qfuse.rewrite.prelude import OpOverload

_AXES = 2


def instruction_of(node: Node) -> Instruction | Refusal:
    """Return the instruction that computes ``node``, or why there is none."""
    op = overload_of(node)
    make = _MAKERS.get(op) if op is not None else None
    if make is None:
        return Refusal("it has no instruction")
    try:
        check_layout(node)
        return make(node)
    except RefusedError as refused:
        return Refusal(refused.reason)


def _linear(node: Node) -> Instruction:
    fused = as_fused_linear(node)
    assert fused is not None, "called for linears"
    known, others = _product(fused)
    return Instruction("linear", (fused.x, *others), known)


def _convolution(node: Node) -> Instruction:
    fused = as_fused_convolution(node)
    assert fused is not None, "called for convolutions"
    if fused.transposed:
        raise RefusedError("it is transposed")
    known, others = _product(fused)
    known |= {
        "stride": np.array(fused.stride),
        "dilation": np.array(fused.dilation),
        "padding": np.array(fused.sides),
        "groups": np.array(fused.groups),
    }
    return Instruction("convolution", (fused.x, *others), known)


def _product(fused: FusedProduct) -> tuple[dict[str, Array], tuple[Node, ...]]:
    """Return the constants of a linear or convolution, and its operands besides ``x``."""
    out = steps_of(fused.out_params, "its result")
    x = steps_of(fused.x_params, "its input")
    weight_steps = steps_of(fused.weight_params, "its weight", axis=0)
    stored = constant_of(fused.weight)
    if stored is None:
        raise RefusedError("its weight is computed at run time")
    bias = None if fused.bias is None else constant_of(fused.bias)
    if fused.bias is not None and bias is None:
        raise RefusedError("its bias is computed at run time")
    column = (-1, *(1,) * (stored.dim() - 1))
    weight = stored.long() - weight_steps.zero.reshape(column)
    scale = (x.scale * weight_steps.scale).expand(len(weight))
    steps = integer_bias(bias, scale)
    check_sums(weight, x, steps)
    known, others = finish(scale, out, fused.epilogue, fused.extras, fused.node)
    known |= {
        # With a zero point it may need 9 bits.
        "weight": weight.numpy().astype(np.int16),
        "bias": steps.numpy().astype(np.int32),
        "x_zero": np.array(int(x.zero)),
    }
    return known, others


def _activation(node: Node) -> Instruction:
    """Sums of stored tensors, or a function of one."""
    op = as_activation(node)
    assert op is not None, "called for activations"
    if op.output.keep or op.output.choose is not None:
        raise RefusedError("its result is chosen at run time, or is kept in float")
    x, out = steps_of(op.x_params, "its input"), steps_of(op.output.params, "its result")
    if not op.extras:
        if not all(isinstance(step, (Act, Cast)) for step in op.epilogue.ops):
            raise RefusedError(f"it has no instruction for {op.epilogue}")
        return Instruction("lookup", (op.x,), {"table": _codes(node, op.x)}, listed=True)
    known, others = finish(x.scale, out, op.epilogue, op.extras, node)
    known["x_zero"] = np.array(int(x.zero))
    return Instruction("add", (op.x, *others), known, listed=True)


def _codes(node: Node, x: Node) -> Array:
    """Return the result of an activation for each of the 256 values of its input."""
    op = as_activation(node)
    assert op is not None, "called for activations"
    assert op.x_params is not None, "it was checked"
    assert op.output.params is not None, "it was checked"
    params, out = _values(op.x_params), _values(op.output.params)
    real = dequantize(_all_codes(dtype_of(x)), *params)
    table: Array = quantize(op.epilogue.apply(real, ()), *out).numpy()
    return table


def _requantize(node: Node) -> Instruction:
    op = as_requantize(node)
    assert op is not None, "called for requantizes"
    steps_of(op.params, "its input")
    steps_of(op.out_params, "its result")
    real = dequantize(_all_codes(dtype_of(op.q)), *_values(op.params))
    return Instruction(
        "lookup", (op.q,), {"table": quantize(real, *_values(op.out_params)).numpy()}
    )


def _all_codes(dtype: torch.dtype) -> torch.Tensor:
    info = torch.iinfo(dtype)
    return torch.arange(info.min, info.max + 1).to(dtype)


def _values(params: QuantParams) -> tuple[Any, ...]:
    """Return per-tensor parameters as arguments of the reference, for one axis."""
    found = compact_params(params, 0)
    assert isinstance(found, CompactParams), "it was checked"
    return found.scale, found.zero_point, params.spec.with_block((None,)), None


def _clamp(node: Node) -> Instruction:
    a = arguments(node)
    x = _stored_operand(node)
    info = torch.iinfo(dtype_of(x))
    low = info.min if a["min"] is None else a["min"]
    high = info.max if a["max"] is None else a["max"]
    if not isinstance(low, int) or not isinstance(high, int) or low > high:
        raise RefusedError("its bounds are not integers in order")
    bounds = {"low": np.array(max(low, info.min)), "high": np.array(min(high, info.max))}
    return Instruction("clamp", (x,), bounds)


def _max_pool(node: Node) -> Instruction:
    a = arguments(node)
    if a["ceil_mode"]:
        raise RefusedError("its last window may lie outside of the image")
    kernel = _pair(a["kernel_size"])
    known = {
        "kernel": kernel,
        "stride": _pair(a["stride"]) if a["stride"] else kernel,
        "padding": _pair(a["padding"]),
        "dilation": _pair(a["dilation"]),
    }
    x = _stored_operand(node)
    if len(shape_of(x)) < _AXES:
        raise RefusedError("its input has fewer than two axes")
    return Instruction("max_pool", (x,), known)


def _stored_operand(node: Node) -> Node:
    (x,) = node.all_input_nodes if len(node.all_input_nodes) == 1 else (None,)
    if x is None or dtype_of(x) not in {torch.int8, torch.uint8}:
        raise RefusedError("its input is not stored in 8-bit integers")
    if not shape_of(x):
        raise RefusedError("its input has no axis")
    return x


def _pair(value: object) -> Array:
    numbers = list(value) if isinstance(value, Sequence) else [value]
    return np.array(numbers * _AXES if len(numbers) == 1 else numbers)


_MAKERS: Mapping[OpOverload, Callable[[Node], Instruction]] = {
    ops.linear: _linear,
    ops.convolution: _convolution,
    ops.activation: _activation,
    ops.requantize: _requantize,
    ops.elementwise: elementwise_of,
    ops.average_pool: average_of,
    aten.clamp.default: _clamp,
    aten.max_pool2d.default: _max_pool,
}

SUPPORTED = frozenset(_MAKERS)
"""The ops that may become instructions."""
