"""The parts of a norm that is written in plain ATen: statistics, roots, and what they divide."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import REALS, widens
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.ops.constants import constant_value, number_of
from qfuse.ir.ops.norm_spec import Root, Statistic
from qfuse.ir.ops.views import dtype_of, node_of, shape_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.optimize.match.casts import cast_source, exact_source
from qfuse.rewrite.prelude import Miss, MissCode, Node, arguments, aten

_VARIANCES = (aten.var.dim, aten.var.correction)
_MEANS = (aten.mean.dim,)


@dataclass(frozen=True, slots=True)
class Reduced:
    """A mean or variance over the last axes.

    Attributes:
        source: What it is of.
        axes: How many axes, from the last.
    """

    source: Node
    axes: int


@dataclass(frozen=True, slots=True)
class Variance:
    """What the root is taken of: the variance and ``eps``.

    Attributes:
        source: The tensor whose variance or mean square it is, in the type of the statistics.
        axes: How many axes, from the last.
        eps: What is added.
        statistic: Which of the two.
        inner: The nodes that it consists of.
        casts: The casts that were looked through.
    """

    source: Node
    axes: int
    eps: float
    statistic: Statistic
    inner: tuple[Node, ...]
    casts: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Factor:
    """What a tensor is multiplied or divided by: the root of a variance.

    Attributes:
        variance: What the root is of.
        root: How it is spelled.
        inner: The nodes of root and variance.
    """

    variance: Variance
    root: Root
    inner: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Centred:
    """``x - mean(x)``.

    Attributes:
        x: What is centred, without casts that keep its numbers.
        axes: How many axes, from the last.
        inner: The nodes that it consists of.
        casts: The casts that were looked through.
    """

    x: Node
    axes: int
    inner: tuple[Node, ...]
    casts: tuple[Node, ...]


def is_float(value: object) -> bool:
    """Whether ``value`` is a node of a tensor of a type that models compute in."""
    return (
        isinstance(value, Node)
        and isinstance(value.meta.get("val"), torch.Tensor)
        and dtype_of(value) in REALS
    )


def operands(node: Node) -> tuple[tuple[Node, Node], ...]:
    """Return the two tensors of a product or an unscaled sum, in both orders."""
    a = arguments(node)
    left, right = a["self"], a["other"]
    if not is_float(left) or not is_float(right) or a.get("alpha", 1) != 1:
        return ()
    first, second = node_of(left), node_of(right)
    return ((first, second), (second, first))


def factor_of(node: Node, *, divides: bool) -> Factor | Miss:
    """Read what a tensor is multiplied by, or with ``divides`` what it is divided by.

    Args:
        node: One operand of the product or quotient.
        divides: The tensor is divided by it.
    """
    rounded, casts = node, []
    if (source := cast_source(node)) is not None:
        rounded, casts = source, [node]
    found = _sqrt(rounded) if divides else _inverse_root(rounded)
    if found is None:
        return Miss(MissCode.PATTERN, node, "{} is no root", op_name(node), progress=0)
    of, root, inner = found
    variance = variance_of(of)
    if isinstance(variance, Miss):
        return variance
    return Factor(variance, root, (*casts, *inner, *variance.inner))


def _inverse_root(node: Node) -> tuple[Node, Root, tuple[Node, ...]] | None:
    if is_call(node, aten.rsqrt.default):
        return node_of(arguments(node)["self"]), Root.RSQRT, (node,)
    if _is_power(node, -0.5):
        return node_of(arguments(node)["self"]), Root.POWER, (node,)
    inner: tuple[Node, ...] = ()
    if is_call(node, aten.mul.Tensor) and _is_number(arguments(node)["other"], 1):
        # How ``1 / tensor`` is traced.
        inner = (node,)
        node = node_of(arguments(node)["self"])
    if is_call(node, aten.reciprocal.default):
        below = arguments(node)["self"]
    elif is_call(node, aten.div.Tensor) and _is_number(arguments(node)["self"], 1):
        below = arguments(node)["other"]
    else:
        return None
    found = _sqrt(below) if isinstance(below, Node) else None
    return None if found is None else (found[0], Root.RECIPROCAL, (*inner, node, *found[2]))


def _sqrt(node: Node) -> tuple[Node, Root, tuple[Node, ...]] | None:
    if is_call(node, aten.sqrt.default) or _is_power(node, 0.5):
        return node_of(arguments(node)["self"]), Root.DIVIDE, (node,)
    return None


def _is_power(node: Node, exponent: float) -> bool:
    return is_call(node, aten.pow.Tensor_Scalar) and _is_number(
        arguments(node)["exponent"], exponent
    )


def _is_number(value: Argument, number: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == number


def variance_of(node: Node) -> Variance | Miss:
    """Read the sum of a variance and ``eps``."""
    found = _with_eps(node)
    if isinstance(found, Miss):
        return found
    spread, eps = found
    if not is_call(spread, *_VARIANCES):
        return _mean_square(node, spread, eps)
    biased = _biased(spread)
    if isinstance(biased, Miss):
        return biased
    return Variance(biased.source, biased.axes, eps, Statistic.VARIANCE, (node, spread))


def _with_eps(node: Node) -> tuple[Node, float] | Miss:
    if not is_call(node, aten.add.Tensor):
        text = "the root is of {}, not of a sum with eps"
        return Miss(MissCode.PATTERN, node, text, op_name(node), progress=1)
    a = arguments(node)
    if a["alpha"] != 1:
        return Miss(MissCode.ARGUMENT, node, "alpha={} scales eps", a["alpha"], progress=2)
    left, right = a["self"], a["other"]
    if isinstance(left, Node) and constant_value(left) is not None:
        left, right = right, left
    if not isinstance(left, Node):
        return Miss(MissCode.PATTERN, node, "the root is of a number", progress=1)
    eps = _eps(node, left, right)
    return eps if isinstance(eps, Miss) else (left, eps)


def _mean_square(node: Node, mean: Node, eps: float) -> Variance | Miss:
    found = _mean(mean)
    if isinstance(found, Miss):
        return found
    square = found.source
    squared = _squared(square)
    if squared is None:
        text = "the mean is of {}, not of squares"
        return Miss(MissCode.PATTERN, square, text, op_name(square), progress=2)
    source, casts = squared
    return Variance(source, found.axes, eps, Statistic.SQUARES, (node, mean, square), casts)


def _squared(node: Node) -> tuple[Node, tuple[Node, ...]] | None:
    """Return what ``node`` is the square of, in the type in which it is squared."""
    if is_call(node, aten.square.default) or _is_power(node, 2):
        return node_of(arguments(node)["self"]), ()
    if is_call(node, aten.mul.Tensor) and operands(node):
        left, right = operands(node)[0]
        (one, casts), (other, others) = exact_source(left), exact_source(right)
        if one is other and dtype_of(left) == dtype_of(right):
            return left, (*casts, *others)
    return None


def _eps(node: Node, mean: Node, value: Argument) -> float | Miss:
    eps = number_of(value)
    if eps is None:
        return Miss(MissCode.NOT_CONSTANT, node, "eps is not a constant", progress=2)
    eps, own = float(eps), dtype_of(mean)
    if not 0 <= eps < math.inf:
        return Miss(MissCode.ARGUMENT, node, "eps is {}", eps, progress=2)
    if dtype_of(node) != own or len(shape_of(node)) != len(shape_of(mean)):
        return Miss(MissCode.DTYPE, node, "eps changes the type of the variance", progress=2)
    # Whether a tensor is rounded to a narrow type before it is added is up to the kernel.
    narrow = isinstance(value, Node) and not widens(torch.float32, own)
    if narrow and torch.tensor(eps, dtype=own).item() != eps:
        text = "eps is a tensor, and not a number of {}"
        return Miss(MissCode.DTYPE, node, text, dtype_name(own), progress=2)
    return eps


def _mean(node: Node) -> Reduced | Miss:
    if not is_call(node, *_MEANS):
        text = "the root is of {}, not of a mean or variance"
        return Miss(MissCode.PATTERN, node, text, op_name(node), progress=1)
    a = arguments(node)
    source = node_of(a["self"])
    if a["dtype"] is not None and a["dtype"] != dtype_of(source):
        text = "the mean is computed in another type than its source"
        return Miss(MissCode.DTYPE, node, text, progress=2)
    return _reduced(node, source, a["dim"], a["keepdim"])


def _biased(node: Node) -> Reduced | Miss:
    a = arguments(node)
    if is_call(node, aten.var.dim):
        biased = a["unbiased"] is False
    else:
        biased = _is_number(a["correction"], 0)
    if not biased:
        text = "the variance is corrected for a sample, that of a layer norm is not"
        return Miss(MissCode.ARGUMENT, node, text, progress=2)
    return _reduced(node, node_of(a["self"]), a["dim"], a["keepdim"])


def _reduced(node: Node, source: Node, dims: Argument, keepdim: Argument) -> Reduced | Miss:
    if keepdim is not True:
        text = "its axes are gone, so that it is along others that it is broadcast"
        return Miss(MissCode.ARGUMENT, node, text, progress=2)
    axes = trailing_axes(dims, len(shape_of(source)))
    if axes is None:
        text = "it is over the axes {}, which are not the last ones"
        return Miss(MissCode.AXIS, node, text, dims, progress=2)
    if not is_float(source):
        return Miss(MissCode.DTYPE, source, "it is of {}", dtype_of(source), progress=2)
    return Reduced(source, axes)


def trailing_axes(dims: Argument, rank: int) -> int | None:
    """Return how many axes ``dims`` names, if they are the last ones of ``rank``."""
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, (list, tuple)) or not dims:
        return None
    named = {d % rank for d in dims if isinstance(d, int) and -rank <= d < rank}
    count = len(dims)
    return count if named == set(range(rank - count, rank)) else None


def centred_of(node: Node) -> Centred | None:
    """Read ``x - mean(x)`` behind casts that keep its numbers."""
    node, casts = exact_source(node)
    if not is_call(node, aten.sub.Tensor) or not operands(node):
        return None
    left, right = operands(node)[0]
    mean = _mean(right)
    if isinstance(mean, Miss):
        return None
    (x, first), (source, second) = exact_source(left), exact_source(mean.source)
    if x is not source or dtype_of(node) != dtype_of(right):
        return None
    return Centred(x, mean.axes, (node, right), (*casts, *first, *second))
