"""What oneDNN's linears and convolutions share: operands, activations after them, results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import BYTES
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.value_range import is_zero
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.spec import Arithmetic, Block, QuantSpec, dtype_range
from qfuse.ir.sizes import element_count
from qfuse.normalize.importers.library.encoding import (
    Encoding,
    Fixed,
    Unpacked,
    check_dtype,
    constant_values,
)
from qfuse.normalize.importers.qdq import Recipe, make_spec
from qfuse.normalize.importers.qparams import fit, fit_zero_point
from qfuse.normalize.importers.rule import RefusedError
from qfuse.rewrite.prelude import MissCode, Node, OpOverload, Rewriter, aten

FLOAT8 = (torch.float8_e4m3fn,)
RESULTS = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class PostOp:
    """An activation after a product, in float32.

    Attributes:
        op: The op, or ``None``.
        args: Its arguments after the value.
        kwargs: Its keyword arguments.
    """

    op: OpOverload | None
    args: tuple[Argument, ...] = ()
    kwargs: tuple[tuple[str, Argument], ...] = ()

    def build(self, rw: Rewriter, x: Node) -> Node:
        """Add the call."""
        return x if self.op is None else rw.call(self.op, x, *self.args, **dict(self.kwargs))


_PLAIN: dict[str, OpOverload | None] = {
    "none": None,
    "": None,
    "relu": aten.relu.default,
    "hardswish": aten.hardswish.default,
    "swish": aten.silu.default,
    "tanh": aten.tanh.default,
}
_WITH_NUMBERS = {"hardtanh": (aten.hardtanh.default, 2), "leaky_relu": (aten.leaky_relu.default, 1)}
_GELU = ("none", "tanh")


def read_post_op(node: Node, name: Argument, numbers: Argument, algorithm: Argument) -> PostOp:
    """Return the activation of the given name.

    Raises:
        RefusedError: It is not known.
    """
    given = [n for n in numbers if n is not None] if isinstance(numbers, (list, tuple)) else []
    floats = tuple(n for n in given if isinstance(n, (int, float)) and not isinstance(n, bool))
    key = "none" if name is None else str(name)
    if key in _PLAIN and not given:
        return PostOp(_PLAIN[key])
    if key in _WITH_NUMBERS and len(floats) == len(given) == _WITH_NUMBERS[key][1]:
        return PostOp(_WITH_NUMBERS[key][0], floats)
    if key == "gelu" and algorithm in _GELU and not given:
        return PostOp(aten.gelu.default, (), (("approximate", str(algorithm)),))
    text = "its activation {!r} with the arguments {} is not known"
    raise RefusedError(MissCode.ARGUMENT, node, text, key, given)


@dataclass(frozen=True, slots=True)
class Result:
    """The type of a result, and how it is quantized.

    Attributes:
        dtype: A float type, or an 8-bit integer type.
        scale: The scale of integers.
        zero_point: The zero point of integers.
    """

    dtype: torch.dtype
    scale: float
    zero_point: int

    def build(self, rw: Rewriter, x: Node, name: str) -> Node:
        """Cast or quantize ``x``, which is float32."""
        if self.dtype is torch.float32:
            return x
        if self.dtype not in BYTES:
            return rw.call(aten._to_copy.default, x, dtype=self.dtype)
        rank = len(shape_of(x))
        spec = _whole_spec(self.dtype, rank)
        one = (1,) * rank
        scale = rw.constant(torch.full(one, self.scale), f"{name}_output_scale")
        zero = None
        if self.zero_point:
            held = torch.full(one, self.zero_point, dtype=torch.int32)
            zero = rw.constant(held, f"{name}_output_zero_point")
        return rw.call(ops.quantize, x, scale, zero, str(spec))


def read_result(node: Node, scale: Argument, zero: Argument) -> Result:
    """Return the type of the result, which the call has.

    Raises:
        RefusedError: It is not a type that canonical ops return.
    """
    dtype = dtype_of(node)
    check_dtype(node, "result", dtype, (*RESULTS, *BYTES))
    is_number = isinstance(scale, (int, float)) and isinstance(zero, int)
    if not is_number:
        text = "the scale of its result is not known before run time"
        raise RefusedError(MissCode.NOT_CONSTANT, node, text)
    assert isinstance(scale, (int, float)), "checked"
    assert isinstance(zero, int), "checked"
    if dtype in BYTES and not dtype_range(dtype)[0] <= zero <= dtype_range(dtype)[1]:
        text = "the zero point {} of its result is outside {}"
        raise RefusedError(MissCode.ZERO_POINT, node, text, zero, dtype)
    return Result(dtype, float(scale), zero)


def read_activation(node: Node, x: Node, scale: Argument, zero: Argument) -> Encoding:
    """Return how an activation is quantized, with one scale, a number or a tensor.

    Raises:
        RefusedError: It has another type, or scales of another shape.
    """
    dtype = dtype_of(x)
    check_dtype(node, "activation", dtype, (*BYTES, *FLOAT8))
    spec = _whole_spec(dtype, len(shape_of(x)))
    one = (1,) * spec.rank
    zero_point: Recipe | None = None
    if isinstance(zero, Node):
        _check_single(node, zero, "zero point")
        zero_point = fit_zero_point(node, zero, one)
    elif isinstance(zero, int) and zero and dtype in BYTES:
        zero_point = Fixed(torch.full(one, zero, dtype=torch.int32))
    if dtype not in BYTES and zero_point is not None:
        raise RefusedError(MissCode.ZERO_POINT, node, "{} values have no zero point", dtype)
    if isinstance(scale, Node):
        _check_single(node, scale, "scale")
        check_dtype(node, "scale", dtype_of(scale), (torch.float32,))
        return Encoding(x, fit(node, scale, one), zero_point, spec)
    if not isinstance(scale, (int, float)):
        text = "the scale of its activation is not known before run time"
        raise RefusedError(MissCode.NOT_CONSTANT, node, text)
    return Encoding(x, Fixed(torch.full(one, float(scale))), zero_point, spec)


def read_weight(
    node: Node, packed: Node, scale: Node, zero: Node, *, axis: int, rows: int | None = None
) -> Encoding:
    """Return how a packed weight is quantized.

    Args:
        node: The library's product.
        packed: The weight, or its packing.
        scale: One scale, or one per output feature.
        zero: Its zero points, which have to be 0.
        axis: The axis of output features in the packed weight.
        rows: Rank of the weight as the product of floats has it, if another.

    Raises:
        RefusedError: It is not constant, or has zero points.
    """
    stored = constant_values(packed, "packed weight")
    check_dtype(node, "weight", stored.dtype, (torch.int8, *FLOAT8))
    if axis == 1:
        stored = stored.t().contiguous()
    if rows is not None and stored.ndim == rows + 1 and stored.shape[2] == 1:
        # A convolution of one axis is packed as one of two.
        stored = stored.squeeze(2)
    if not is_zero(zero):
        raise RefusedError(MissCode.ZERO_POINT, zero, "its weight has zero points other than 0")
    check_dtype(node, "scale", dtype_of(scale), (torch.float32,))
    count, n = element_count(shape_of(scale)), stored.shape[0]
    if count not in {1, n}:
        text = "it has {} scales for {} output features"
        raise RefusedError(MissCode.SHAPE, scale, text, count, n)
    block: Block = (None if count == 1 else 1, *(None,) * (stored.ndim - 1))
    held = stored.dtype, dtype_range(stored.dtype)
    spec = make_spec(node, held, block, torch.float32, Arithmetic(torch.float32))
    return Encoding(Unpacked(packed, stored), fit(node, scale, spec.grid(stored.shape)), None, spec)


def is_number(value: Argument, *expected: float) -> bool:
    """Whether an argument is one of the numbers."""
    return isinstance(value, (int, float)) and value in expected


def integers(node: Node, value: Argument, count: int) -> list[int]:
    """Return one integer per axis; one for all axes is repeated.

    Raises:
        RefusedError: They are not known at compile time.
    """
    given: Sequence[Argument] = value if isinstance(value, (list, tuple)) else [value]
    found = [n for n in given if isinstance(n, int)]
    if len(found) != len(given) or len(found) not in {1, count}:
        text = "its geometry {} is not one number per axis of {}"
        raise RefusedError(MissCode.ARGUMENT, node, text, value, count)
    return found * count if len(found) == 1 else found


def _whole_spec(dtype: torch.dtype, rank: int) -> QuantSpec:
    return QuantSpec(dtype, *dtype_range(dtype), (None,) * rank)


def _check_single(node: Node, param: Node, what: str) -> None:
    if element_count(shape_of(param)) != 1:
        text = "the {} of its activation has the shape {}"
        raise RefusedError(MissCode.SHAPE, node, text, what, tuple(shape_of(param)))
