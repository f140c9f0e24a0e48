"""Scales and zero points of chains of plain arithmetic, brought to one entry per block."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx.node import Argument

from qfuse.ir.graph.schema import overload_of
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.spec import Block, QuantSpec, dtype_name, dtype_range
from qfuse.ir.sizes import Size, same_shape
from qfuse.normalize.importers.rule import RefusedError
from qfuse.normalize.match.broadcast import block_of, padded
from qfuse.normalize.match.constants import derived
from qfuse.normalize.match.quantized_values import integers_of
from qfuse.normalize.match.views import transpose_source, view_source, with_shape
from qfuse.rewrite.prelude import MissCode, Node, Rewriter, aten

_STEPS = 8


@dataclass(frozen=True, slots=True)
class Factor:
    """A scale or zero point, and what it must become.

    Attributes:
        home: The node that it comes from, or that it is written in as a number.
        shape: One entry per block, in the rank of the data.
        value: Its value, if it is known before run time.
        what: A word for it.
    """

    home: Node
    shape: tuple[Size, ...]
    value: torch.Tensor | None
    what: str

    def build(self, rw: Rewriter) -> Node:
        """Return a node of this shape."""
        if self.value is not None:
            return derived(rw, self.home, self.value, self.what)
        node = self.home
        for _ in range(len(self.shape) - len(shape_of(node))):
            node = rw.call(aten.unsqueeze.default, node, 0)
        return node


def constant_factor(node: Node, value: torch.Tensor, rank: int, what: str) -> Factor:
    """Return a factor of known value in the given rank, named after the constant behind it."""
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
    is_scale: Callable[[Node], bool],
) -> tuple[Factor, Block]:
    """Read what stored numbers of ``shape`` are multiplied or divided by.

    Args:
        at: The product or quotient.
        by: The factor: a node or a number.
        shape: Shape of the stored numbers.
        compute: Type in which a number enters the arithmetic.
        is_scale: Whether a factor that is computed at run time is a scale, not just a factor.

    Raises:
        RefusedError: It is not a scale.
    """
    rank = len(shape)
    if isinstance(by, (int, float)) and not isinstance(by, bool):
        value = torch.full((1,) * rank, float(by), dtype=compute)
        if not 0 <= value.max().item() < math.inf:
            raise RefusedError(MissCode.RANGE, at, "the factor {} is no scale", by)
        return Factor(at, (1,) * rank, value, "scale"), (None,) * rank
    if not isinstance(by, Node) or not dtype_of(by).is_floating_point:
        raise RefusedError(MissCode.DTYPE, at, "the factor is not a float tensor")
    known = constant_value(by)
    if known is None and not is_scale(by):
        text = "the factor is no constant, and not known to be a scale that quantization chose"
        raise RefusedError(MissCode.NOT_CONSTANT, by, text)
    block = block_of(shape, shape_of(by))
    if block is None:
        text = "a scale of shape {} does not tile stored numbers of shape {}"
        raise RefusedError(MissCode.SHAPE, by, text, tuple(shape_of(by)), tuple(shape))
    if not any(
        not _is_one(size) and _is_one(count)
        for size, count in zip(shape, padded(shape_of(by), rank), strict=True)
    ):
        text = "a scale of shape {} has one entry per element, so it is just a factor"
        raise RefusedError(MissCode.SHAPE, by, text, tuple(shape_of(by)))
    if known is not None and not bool((known.isfinite() & (known >= 0)).all()):
        text = "the factor is infinite, NaN or negative, so it is no scale"
        raise RefusedError(MissCode.RANGE, by, text)
    if known is None or transpose_source(by) is not None:
        # A transposed scale stays, so that the transpose of its weight can cancel it.
        return Factor(by, padded(shape_of(by), rank), None, "scale"), block
    return constant_factor(by, known, rank, "scale"), block


def zero_factor(
    at: Node,
    zero: Argument,
    grid: Sequence[Size],
    storage: torch.dtype,
    is_zero_point: Callable[[Node], bool],
) -> Factor | None:
    """Read what is subtracted from stored numbers whose scale has the shape ``grid``.

    Args:
        at: The op that ends the chain.
        zero: What is subtracted or added: a node or a number.
        grid: Shape of the scale.
        storage: Type of the stored numbers.
        is_zero_point: Whether integers that are computed at run time are a zero point.

    Returns:
        ``None`` if it is zero everywhere.

    Raises:
        RefusedError: It is not a zero point of these stored numbers.
    """
    if isinstance(zero, Node) and constant_value(zero) is None:
        return _run_time_zero(at, zero, grid, is_zero_point)
    value = constant_value(zero) if isinstance(zero, Node) else None
    if value is None:
        assert isinstance(zero, (int, float)), f"not a number: {zero!r}"
        value = torch.tensor(zero)
    low, high = dtype_range(storage)
    integers = value.double()
    if not bool(((integers == integers.round()) & (integers >= low) & (integers <= high)).all()):
        text = "the zero point is not an integer in [{}, {}], the range of {}"
        raise RefusedError(MissCode.ZERO_POINT, at, text, low, high, dtype_name(storage))
    if not bool(integers.any()):
        return None
    home = zero if isinstance(zero, Node) else at
    found = constant_factor(home, integers.to(torch.int32), len(grid), "zero_point")
    if same_shape(found.shape, grid):
        return found
    if value.numel() == 1 and all(isinstance(size, int) for size in grid):
        assert found.value is not None, "it is a constant"
        spread = found.value.expand([int(size) for size in grid]).contiguous()
        return Factor(home, tuple(grid), spread, "zero_point")
    text = "a zero point of shape {} has other blocks than a scale of shape {}"
    raise RefusedError(MissCode.SHAPE, at, text, found.shape, tuple(grid))


def chosen_at_run_time(node: Node) -> bool:
    """Whether ``node`` shows a result of an op that chooses quantization parameters."""
    seen: Node | None = node
    for _ in range(_STEPS):
        if seen is None:
            return False
        if seen.op == "call_function" and seen.target is operator.getitem:
            op = overload_of(seen.all_input_nodes[0])
            return op is not None and "choose_qparams" in str(op)
        seen = view_source(seen)
    return False


def _is_one(size: Size) -> bool:
    return isinstance(size, int) and size == 1


def _run_time_zero(
    at: Node, zero: Node, grid: Sequence[Size], is_zero_point: Callable[[Node], bool]
) -> Factor:
    """Look through the cast of an integer zero point."""
    node = integers_of(zero)
    if node is None or not is_zero_point(node):
        text = (
            "the zero point is no constant, and no op that chooses zero points gave it: "
            "quantize symmetrically, or call such an op"
        )
        raise RefusedError(MissCode.NOT_CONSTANT, zero, text)
    found = with_shape(node, grid)
    if found is None or not same_shape(padded(shape_of(zero), len(grid)), grid):
        text = "a zero point of shape {} has other blocks than a scale of shape {}"
        raise RefusedError(MissCode.SHAPE, at, text, shape_of(zero), tuple(grid))
    return Factor(found, tuple(grid), None, "zero_point")


def check_range(node: Node, scale: torch.Tensor, spec: QuantSpec, *, shifted: bool) -> None:
    """Check that scaled numbers are normal numbers of the type that they are rounded to.

    Raises:
        RefusedError: They may overflow, or lose their precision.
    """
    info, size = torch.finfo(spec.real), scale.double().abs()
    most = float(max(-spec.quant_min, spec.quant_max)) * (2 if shifted else 1)
    normal = (size == 0) | (size >= info.tiny)
    if not bool((size * most <= info.max).all()) or not bool(normal.all()):
        text = "scaled numbers would not be normal numbers of {}"
        raise RefusedError(MissCode.RANGE, node, text, dtype_name(spec.real))
