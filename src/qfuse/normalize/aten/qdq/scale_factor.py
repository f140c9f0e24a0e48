"""Scales and zero points in plain arithmetic, converted to one entry per block."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx.node import Argument

from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.value_range import bounds_of
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.spec import QuantSpec, dtype_name, dtype_range
from qfuse.ir.sizes import Size, is_one, same_shape
from qfuse.normalize.match.broadcast import block_of, padded
from qfuse.normalize.match.constants import derived, parameter_value
from qfuse.normalize.match.quantized_values import as_integers, integers_of
from qfuse.normalize.match.quotients import may_divide_by_zero
from qfuse.normalize.match.views import transpose_source, view_source, with_shape
from qfuse.rewrite.pattern.base import is_tensor
from qfuse.rewrite.prelude import Miss, MissCode, Node, Rewriter, aten

# Bounds the walk above a parameter, which `match` starts at every product.
_STEPS = 8


@dataclass(frozen=True, slots=True)
class Factor:
    """A scale or zero point, and the shape that it needs.

    Attributes:
        home: The node that it derives from, or in which it is written as a number.
        shape: One entry per block, in the rank of the data.
        value: Its value, if it is known at compile time.
        what: The suffix of its name.
    """

    home: Node
    shape: tuple[Size, ...]
    value: torch.Tensor | None
    what: str

    def build(self, rw: Rewriter) -> Node:
        """Return a node of this shape."""
        if self.value is not None:
            return derived(rw, self.home, self.value, self.what)
        node = self.home if self.what == "scale" else as_integers(rw, self.home)
        for _ in range(len(self.shape) - len(shape_of(node))):
            node = rw.call(aten.unsqueeze.default, node, 0)
        if same_shape(shape_of(node), self.shape):
            return node
        return rw.call(aten.expand.default, node, list(self.shape))


def constant_factor(node: Node, value: torch.Tensor, rank: int, what: str) -> Factor:
    """Return a factor of known value in the given rank, named after its original constant."""
    # Named after the constant, so that the names of parameters stay readable.
    home = node
    while (source := view_source(home) or cast_source(home)) is not None:
        home = source
    node = home if home.op == "get_attr" else node
    shape = padded(tuple(value.shape), rank)
    return Factor(node, shape, value.reshape([int(s) for s in shape]), what)


def scale_factor(
    at: Node,
    by: Argument,
    shape: Sequence[Size],
    compute: torch.dtype,
    *,
    signed: bool = False,
) -> Factor | Miss:
    """View the factor or divisor of quantized values of ``shape`` as a scale.

    Args:
        at: The product or quotient.
        by: The factor: a node or a number.
        shape: Shape of the quantized values.
        compute: Dtype in which a number enters the arithmetic.
        signed: Whether the scale of a dequantize is meant, which may be negative.
    """
    if not shape:
        return Miss(MissCode.SHAPE, at, "a tensor without axes has no blocks with a scale")
    if isinstance(by, (int, float)) and not isinstance(by, bool):
        number = torch.full((1,) * len(shape), float(by), dtype=compute)
        return _refuse_scale(at, number, signed=signed) or Factor(
            at, tuple(number.shape), number, "scale"
        )
    if not is_tensor(by) or not dtype_of(by).is_floating_point:
        return _no_float(at, by)
    same = same_shape(padded(shape_of(by), len(shape)), shape)
    if block_of(shape, shape_of(by)) is None and not same:
        text = "a scale of shape {} does not tile quantized values of shape {}"
        return Miss(MissCode.SHAPE, by, text, tuple(shape_of(by)), tuple(shape))
    if same or is_per_element(shape, shape_of(by)):
        text = "a scale of shape {} has one entry per element, so it is only a factor"
        return Miss(MissCode.SHAPE, by, text, tuple(shape_of(by)))
    value = parameter_value(by)
    if value is None or transpose_source(by) is not None:
        # A transposed scale is not folded, so that the transpose of its weight can cancel it.
        factor = Factor(by, padded(shape_of(by), len(shape)), None, "scale")
    else:
        factor = constant_factor(by, value, len(shape), "scale")
    return factor if value is None else _refuse_scale(by, value, signed=signed) or factor


def _no_float(at: Node, by: Argument) -> Miss:
    if isinstance(by, Node) and not is_tensor(by):
        text = "the factor is {}, a number that is computed at run time"
        return Miss(MissCode.NOT_CONSTANT, by, text, op_name(by), progress=2)
    return Miss(MissCode.DTYPE, at, "the factor is not a float tensor")


def _refuse_scale(at: Node, value: torch.Tensor, *, signed: bool) -> Miss | None:
    # A scale of zero dequantizes to zeros; `quantize-chain`, which divides by it, refuses it
    # itself. No comparison with NaN holds.
    wrong = ~(value.isfinite() & ((value >= 0) | signed))
    count, total = int(wrong.sum()), value.numel()
    if not count:
        return None
    first = float(value[wrong][0])
    what = "negative" if first < 0 and math.isfinite(first) else "not finite"
    if total == 1:
        text = "the factor is {:g}, which is {}, so it is not a scale"
        return Miss(MissCode.RANGE, at, text, first, what)
    text = "{} of the {} factors are not scales: the first of them is {:g}, which is {}"
    return Miss(MissCode.RANGE, at, text, count, total, first, what)


def inverse_factor(
    at: Node, by: Argument, shape: Sequence[Size], compute: torch.dtype
) -> Factor | Miss:
    """Return the scale whose reciprocal equals the factor bit for bit.

    Args:
        at: The product.
        by: The factor: a node or a number.
        shape: Shape of the values.
        compute: Dtype of the product.
    """
    factor = scale_factor(at, by, shape, compute)
    if isinstance(factor, Miss):
        return factor
    # Whose reciprocal a run-time factor is cannot be seen, and taking one here would round again.
    if factor.value is None:
        text = "it is multiplied by the scale, not by its reciprocal"
        return Miss(MissCode.ARITHMETIC, at, text)
    value = factor.value.to(compute)
    # The factor may be the rounded reciprocal of a float32 or of a float64 scale.
    for dtype in (torch.float32, torch.float64):
        scale = value.to(dtype).reciprocal()
        if torch.equal(scale.reciprocal().to(compute), value):
            return Factor(factor.home, factor.shape, scale, "reciprocal")
    return Miss(MissCode.ARITHMETIC, at, "no scale has this factor as its reciprocal")


def zero_factor(
    at: Node, zero: Argument, grid: Sequence[Size], storage: torch.dtype
) -> Factor | Miss | None:
    """View the subtrahend of quantized values whose scale has the shape ``grid`` as a zero point.

    Args:
        at: The op that ends the chain.
        zero: The subtrahend or summand: a node or a number; ``None`` is zero.
        grid: Shape of the scale.
        storage: Dtype of the quantized values.

    Returns:
        ``None`` if it is zero everywhere.
    """
    if zero is None:
        return None
    value = torch.tensor(zero) if isinstance(zero, (int, float)) else constant_value(zero)
    if value is None:
        assert isinstance(zero, Node), f"not a zero point: {zero!r}"
        return _run_time_zero(at, zero, grid)
    return _known_zero(at, zero if isinstance(zero, Node) else at, value, grid, storage)


def _known_zero(
    at: Node, home: Node, value: torch.Tensor, grid: Sequence[Size], storage: torch.dtype
) -> Factor | Miss | None:
    low, high = dtype_range(storage)
    integers = value.double()
    if not bool((integers == integers.round()).all()):
        return Miss(MissCode.ZERO_POINT, at, "the zero point is not an integer")
    if not bool(((integers >= low) & (integers <= high)).all()):
        text = "the zero point is outside of [{}, {}], the range of {}"
        return Miss(MissCode.ZERO_POINT, at, text, low, high, dtype_name(storage))
    # Without a zero point a spec equals one that never had any, and symmetric kernels take it.
    if not bool(integers.any()):
        return None
    found = constant_factor(home, integers.to(torch.int32), len(grid), "zero_point")
    if same_shape(found.shape, grid):
        return found
    # A scalar zero point applies to all blocks of the scale.
    if value.numel() == 1 and all(isinstance(size, int) for size in grid):
        assert found.value is not None, "it is a constant"
        spread = found.value.expand([int(size) for size in grid]).contiguous()
        return Factor(home, tuple(grid), spread, "zero_point")
    return _other_blocks(at, found.shape, grid)


def chosen_at_run_time(node: Node) -> bool:
    """Whether ``node`` is a chosen quantization parameter, or a view of one."""
    seen: Node | None = node
    for _ in range(_STEPS):
        if seen is None:
            return False
        # Any library's op of that name counts, not only the canonical one.
        if seen.op == "call_function" and seen.target is operator.getitem:
            op = overload_of(seen.all_input_nodes[0])
            return op is not None and "choose_qparams" in str(op)
        seen = view_source(seen)
    return False


def check_range(node: Node, scale: torch.Tensor, spec: QuantSpec, *, shifted: bool) -> Miss | None:
    """Refuse a scale that takes values out of the normal range of the dtype they are rounded to.

    They may overflow, or lose their precision.
    """
    info, size = torch.finfo(spec.float_dtype), scale.double().abs()
    # The difference of two 8-bit values has up to twice their magnitude.
    most = float(max(-spec.quant_min, spec.quant_max)) * (2 if shifted else 1)
    normal = (size == 0) | (size >= info.tiny)
    if bool((size * most <= info.max).all()) and bool(normal.all()):
        return None
    text = "scaled values would not be normal numbers of {}"
    return Miss(MissCode.RANGE, node, text, dtype_name(spec.float_dtype))


def is_per_element(shape: Sequence[Size], grid: Sequence[Size]) -> bool:
    """Whether a scale of shape ``grid`` has an entry of its own for each element."""
    sizes = zip(shape, padded(grid, len(shape)), strict=True)
    return not any(not is_one(size) and is_one(count) for size, count in sizes)


def _run_time_zero(at: Node, zero: Node, grid: Sequence[Size]) -> Factor | Miss:
    """Look through the cast of an integer zero point."""
    node = integers_of(zero)
    if node is None:
        text = (
            "the zero point is neither a constant nor known to be an integer: "
            "store it in the dtype of the quantized values"
        )
        if is_call(zero, aten.round.default):
            text = "the zero point is rounded, but may be outside of the range of int32: clamp it"
        if may_divide_by_zero(zero):
            text = "the zero point is NaN where the scale is zero: clamp the scale to a least value"
        return Miss(MissCode.NOT_CONSTANT, zero, text)
    found = with_shape(node, grid)
    # A view above may happen to have the shape of the grid, while the zero point itself is
    # broadcast in another way. A number applies to all blocks of the scale.
    tiles = same_shape(padded(shape_of(zero), len(grid)), grid)
    alone = all(map(is_one, shape_of(zero)))
    spreads = alone and all(isinstance(size, int) for size in grid)
    # Missing axes are added to what is read, as to the scale.
    if found is None and (tiles or alone) and len(shape_of(node)) <= len(grid):
        found = node if alone or same_shape(padded(shape_of(node), len(grid)), grid) else None
    if found is None or not (tiles or spreads):
        return _other_blocks(at, shape_of(zero), grid)
    return Factor(found, tuple(grid), None, "zero_point")


def exact_zero_factor(node: Node, q: Node, zero: Argument, scale: Factor) -> Factor | Miss | None:
    """View what is subtracted from quantized values as a zero point that loses no bits.

    Args:
        node: The product of the difference and the scale.
        q: The quantized values.
        zero: What is subtracted; ``None`` is zero.
        scale: Their scale.
    """
    factor = zero_factor(node, zero, scale.shape, dtype_of(q))
    wide = dtype_of(node) in {torch.float32, torch.float64}
    if wide or not isinstance(factor, Factor) or factor.value is not None:
        return factor
    # Differences in a wider range than 8-bit values would be rounded to 16 bits.
    (low, high), bounds = dtype_range(dtype_of(q)), bounds_of(factor.home)
    if bounds is not None and low <= bounds[0] and bounds[1] <= high:
        return factor
    text = "the zero point is not known to lie in [{}, {}], the range of {}"
    return Miss(MissCode.ZERO_POINT, node, text, low, high, dtype_name(dtype_of(q)))


def _other_blocks(at: Node, shape: Sequence[Size], grid: Sequence[Size]) -> Miss:
    text = "a zero point of shape {} has other blocks than a scale of shape {}"
    return Miss(MissCode.SHAPE, at, text, tuple(shape), tuple(grid))
