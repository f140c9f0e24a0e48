"""Instructions of ops between products: sums, products of elements, and averages."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.fx import Node

from integer_npu.instruction import Instruction, RefusedError, Steps, finish, steps_of
from integer_npu.kernels import Array
from qfuse.ir.ops.claimed.average_pool import PoolKind, as_average_pool
from qfuse.ir.ops.claimed.elementwise import Elementwise, ElementwiseKind, as_elementwise
from qfuse.ir.ops.compact import CompactParams, compact_params
from qfuse.ir.ops.epilogue import Add, Epilogue, Stored
from qfuse.ir.ops.views import QuantParams, dtype_of, shape_of
from qfuse.ir.quant.reference import dequantize, quantize
from qfuse.ir.sizes import same_shape

# With 8-bit values, whose difference from a zero point has 9 bits, sums fit into 32 bits.
_MOST_TERMS = 1 << 22


def elementwise_of(node: Node) -> Instruction:
    """Return the instruction of a sum, a difference or a product of elements.

    Raises:
        RefusedError: There is none.
    """
    op = as_elementwise(node)
    assert op is not None, "called for elementwise ops"
    x, out = steps_of(op.x_params, "its input"), steps_of(op.out_params, "its result")
    if op.other is None:
        return Instruction("lookup", (op.x,), {"table": _table_of_number(op)})
    other = steps_of(op.other_params, "its second operand")
    if not same_shape(shape_of(op.x), shape_of(op.other)):
        raise RefusedError("an operand is broadcast")
    if op.elementwise.kind is ElementwiseKind.MUL:
        known, _ = finish(x.scale * other.scale, out, op.epilogue, (), node)
        known |= {"x_zero": np.array(int(x.zero)), "other_zero": np.array(int(other.zero))}
        return Instruction("mul", (op.x, op.other), known)
    known, others = finish(x.scale, out, _sum_of(op, other), _stored_other(op), node)
    known["x_zero"] = np.array(int(x.zero))
    return Instruction("add", (op.x, *others), known)


def _sum_of(op: Elementwise, other: Steps) -> Epilogue:
    """Return the sum as a step behind the first operand, in front of the activation."""
    alpha = op.elementwise.alpha
    signed = alpha if op.elementwise.kind is ElementwiseKind.ADD else -alpha
    assert op.other_params is not None, "it was checked"
    zero = None if op.other_params.zero_point is None else 2
    return Epilogue((Add(0, signed, Stored(1, zero, other.spec)), *op.epilogue.ops))


def _stored_other(op: Elementwise) -> tuple[Node, ...]:
    assert op.other is not None, "it was checked"
    assert op.other_params is not None, "it was checked"
    return (op.other, *op.other_params.tensors)


def _table_of_number(op: Elementwise) -> Array:
    """Return the result for each of the 256 values of the tensor."""
    assert op.x_params is not None, "it was checked"
    assert op.out_params is not None, "it was checked"
    info = torch.iinfo(dtype_of(op.x))
    codes = torch.arange(info.min, info.max + 1).to(dtype_of(op.x))
    real = op.elementwise.apply(dequantize(codes, *_flat(op.x_params)), None)
    table: Array = quantize(op.epilogue.apply(real, ()), *_flat(op.out_params)).numpy()
    return table


def _flat(params: QuantParams) -> tuple[object, ...]:
    """Return per-tensor parameters as arguments of the reference, for one axis."""
    found = compact_params(params, 0)
    assert isinstance(found, CompactParams), "it was checked"
    return found.scale, found.zero_point, params.spec.with_block((None,)), None


def average_of(node: Node) -> Instruction:
    """Return the instruction of an average.

    Raises:
        RefusedError: There is none.
    """
    op = as_average_pool(node)
    assert op is not None, "called for average pools"
    pool, sizes = op.pool, shape_of(op.x)
    x, out = steps_of(op.x_params, "its input"), steps_of(op.out_params, "its result")
    known: dict[str, Array] = {"x_zero": np.array(int(x.zero))}
    if pool.kind is PoolKind.WINDOWS:
        if pool.ceil or (pool.valid and any(pool.padding)):
            raise RefusedError("its windows have several sizes")
        count = math.prod(pool.sizes) if pool.divisor is None else pool.divisor
        terms = math.prod(pool.sizes)
        known |= {
            "kernel": np.array(pool.sizes),
            "stride": np.array(pool.stride or pool.sizes),
            "padding": np.array(pool.padding or (0,) * len(pool.sizes)),
        }
    else:
        mean = pool.kind is PoolKind.MEAN
        if not mean and set(pool.sizes) != {1}:
            raise RefusedError("its windows have several sizes")
        axes = pool.sizes if mean else range(len(sizes) - len(pool.sizes), len(sizes))
        lengths = [sizes[axis] for axis in axes]
        if not all(isinstance(length, int) for length in lengths):
            raise RefusedError("it averages a number of elements that is known at run time")
        count = terms = math.prod(int(length) for length in lengths)
        known |= {"axes": np.array(axes), "keep": np.array(not mean or pool.keep)}
    if count == 0 or terms > _MOST_TERMS:
        raise RefusedError("it averages no elements, or more than fit into its sums")
    finished, _ = finish(x.scale / count, out, Epilogue(), (), node)
    name = "average" if pool.kind is PoolKind.WINDOWS else "mean"
    return Instruction(name, (op.x,), known | finished)
