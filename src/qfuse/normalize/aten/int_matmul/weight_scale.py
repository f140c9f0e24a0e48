"""A linear on stored weights that is scaled afterwards is a linear on dequantized weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx.node import Argument

from qfuse.ir.dtypes import REALS
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.linear import Linear, as_linear
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.spec import Arithmetic, QuantSpec, dtype_name, dtype_range
from qfuse.normalize.aten.linear.weights import call_linear
from qfuse.normalize.aten.qdq.scale_factor import (
    Factor,
    check_range,
    chosen_at_run_time,
    constant_factor,
    zero_factor,
)
from qfuse.normalize.importers.rule import RefusedError, accepted
from qfuse.normalize.match.broadcast import Broadcast, broadcast_of
from qfuse.normalize.match.constants import derived, is_unit
from qfuse.normalize.match.quantized_values import moved_constant, stored_numbers
from qfuse.normalize.match.views import Path, strip_views
from qfuse.rewrite.prelude import (
    Exactness,
    Miss,
    MissCode,
    Node,
    OpOverload,
    Rewriter,
    Rule,
    arguments,
    aten,
)

_HALF = torch.float16


@dataclass(frozen=True, slots=True)
class WeightScaleSite:
    """A linear, the product that scales its result, and the weight that this makes.

    Attributes:
        node: The product.
        linear: The linear.
        path: What stands between the two.
        q: Stored weight of shape ``[N, K]``.
        scale: Of shape ``[N, 1]`` or ``[1, 1]``.
        zero: Of the same shape, or ``None``.
        spec: The rest of the dequantize.
        bias: The linear's bias, scaled.
    """

    node: Node
    linear: Linear
    path: Path
    q: Node
    scale: Factor
    zero: Factor | None
    spec: QuantSpec
    bias: torch.Tensor | None


class WeightOnlyScale(Rule[WeightScaleSite]):
    """``linear(x, cast(q)) * scale`` becomes ``linear(x, dequantize(q, scale))``.

    Before::

        q -> cast -> sub(zero) --+
        x -----------------------+-> linear -> view, cast -> mul(scale)

    After::

        q, scale, zero -> qfuse.dequantize --+
        x -----------------------------------+-> linear -> view, cast

    A bias inside the product is multiplied by the scale now. The weight may also be a dequantize
    that is not scaled yet: that is how a chain on integer products arrives here.

    Rounding: the scale goes from each sum to each of its terms, and half types round each scaled
    weight instead of the sum, which is noise of the same size. The range is checked, because a
    weight that overflows or is subnormal would be more than noise; sums that overflow float16
    before they are scaled do not overflow any more.

    Refuses: a scale that is computed at run time, or is neither per output feature nor per tensor;
    a scale that brings weights out of the normal range; a linear, or a view of it, that others
    read; a cast to float16 on the way; a bias that is computed at run time.
    """

    name = "weight-only-scale"
    anchors: ClassVar[tuple[OpOverload, ...]] = (aten.mul.Tensor,)
    exactness = Exactness.ROUNDING

    def match(self, node: Node) -> WeightScaleSite | Miss:
        """Match a product of such a linear and a scale, in either order."""
        a = arguments(node)
        for value, scale in ((a["self"], a["other"]), (a["other"], a["self"])):
            path = strip_views(value)
            linear = None if path is None else as_linear(path.base)
            if path is None or linear is None or not _is_unscaled(linear.weight):
                continue
            assert isinstance(value, Node), "it has a path"
            try:
                return _read(node, linear, path, value, scale)
            except RefusedError as refused:
                return refused.miss
        text = "no factor is a linear on stored weights"
        return Miss(MissCode.PATTERN, node, text, progress=0)

    def rewrite(self, site: WeightScaleSite, rw: Rewriter) -> None:
        """Dequantize the weight, and put back what stood between."""
        zero = None if site.zero is None else site.zero.build(rw)
        weight = rw.call(ops.dequantize, site.q, site.scale.build(rw), zero, str(site.spec))
        bias = site.linear.bias
        if bias is not None and site.bias is not None:
            bias = derived(rw, bias, site.bias, "scaled")
        new = call_linear(rw, site.linear.x, weight, bias, like=site.linear.node)
        rw.replace(site.node, site.path.restore(rw, new, dtype_of(site.node)))


def _is_unscaled(weight: Node) -> bool:
    dequantize = as_dequantize(weight)
    if dequantize is not None:
        plain = dequantize.params.spec.is_plain and is_unit(dequantize.params.scale)
        return plain and constant_of(dequantize.q) is not None
    stored = stored_numbers(weight)
    return stored is not None and not stored.views and moved_constant(stored.q) is not None


def _read(node: Node, linear: Linear, path: Path, value: Node, by: Argument) -> WeightScaleSite:
    if path.shared is not None:
        raise RefusedError(MissCode.SHARED, path.shared, "others read the unscaled result too")
    real = dtype_of(linear.node)
    if real not in REALS:
        text = "it is a product of {}: cast the operands to a float type, or use torch._int_mm"
        raise RefusedError(MissCode.DTYPE, linear.node, text, real)
    if _HALF in (*path.dtypes, dtype_of(node)) and real is not _HALF:
        raise RefusedError(MissCode.DTYPE, node, "the unscaled result passes through float16")
    compute = torch.float64 if real is torch.float64 else torch.float32
    scale = _read_scale(node, by, value, compute)
    assert scale.value is not None, "it is a constant"
    q, zero, spec = _read_weight(node, linear.weight, scale, real, compute)
    accepted(check_range(node, scale.value, spec, shifted=zero is not None))
    bias = None
    if linear.bias is not None:
        known = constant_value(linear.bias)
        if known is None:
            text = "the bias is scaled too, and is computed at run time"
            raise RefusedError(MissCode.NOT_CONSTANT, linear.bias, text)
        bias = (known.to(compute) * scale.value.to(compute).reshape(-1)).to(real)
    return WeightScaleSite(node, linear, path, q, scale, zero, spec, bias)


def _read_scale(node: Node, by: Argument, value: Node, compute: torch.dtype) -> Factor:
    """Return the scale in the rank of the weight."""
    if isinstance(by, (int, float)) and not isinstance(by, bool):
        return constant_factor(node, torch.full((1, 1), float(by), dtype=compute), 2, "scale")
    assert isinstance(by, Node), f"not a factor: {by!r}"
    spread = broadcast_of(shape_of(by), shape_of(value))
    if spread is None or spread is Broadcast.ROWS:
        text = "a factor of shape {} on a result of shape {} is not one number per output feature"
        raise RefusedError(MissCode.AXIS, by, text, tuple(shape_of(by)), tuple(shape_of(value)))
    known = constant_value(by)
    if known is None:
        raise RefusedError(MissCode.NOT_CONSTANT, by, "the factor is computed at run time")
    if not known.dtype.is_floating_point:
        known = known.to(compute)
    return constant_factor(by, known.reshape(-1, 1), 2, "scale")


def _read_weight(
    node: Node, weight: Node, scale: Factor, real: torch.dtype, compute: torch.dtype
) -> tuple[Node, Factor | None, QuantSpec]:
    """Return stored numbers, zero point and spec of the scaled weight."""
    block = (None if scale.shape[0] == 1 else 1, None)
    dequantize = as_dequantize(weight)
    if dequantize is not None:
        params = dequantize.params
        if params.zero_point is not None:
            text = "the weight has a zero point of one block, the scale another"
            raise RefusedError(MissCode.ZERO_POINT, params.zero_point, text)
        return dequantize.q, None, params.spec.with_block(block)
    stored = stored_numbers(weight)
    assert stored is not None, "the weight is stored numbers"
    dtype = dtype_of(stored.q)
    zero = None
    if stored.zero is not None:
        if dtype.is_floating_point:
            text = "{} stored numbers have no zero point"
            raise RefusedError(MissCode.ZERO_POINT, weight, text, dtype_name(dtype))
        zero = accepted(zero_factor(node, stored.zero, scale.shape, dtype))
        if zero is not None and zero.value is None and not chosen_at_run_time(zero.home):
            text = "the zero point is no constant, and no op that chooses zero points gave it"
            raise RefusedError(MissCode.NOT_CONSTANT, zero.home, text)
    return stored.q, zero, QuantSpec(dtype, *dtype_range(dtype), block, real, Arithmetic(compute))
