"""Scales of a batch of weights, such as those of experts, that are applied to the product."""

from __future__ import annotations

import torch
from torch.fx.node import Argument

from qfuse.ir.ops import library as ops
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.sizes import is_one, same_shape
from qfuse.normalize.aten.linear.batched_weight import refuse_calls
from qfuse.normalize.aten.qdq.scale_factor import (
    Factor,
    check_range,
    exact_zero_factor,
    scale_factor,
)
from qfuse.normalize.match.broadcast import block_of, padded
from qfuse.normalize.match.quantized_values import (
    QUANTIZED,
    QuantizedValues,
    full_range_spec,
    moved_constant,
)
from qfuse.normalize.match.views import transpose_source
from qfuse.rewrite.pattern import (
    Capture,
    Either,
    Match,
    Operand,
    Path,
    PatternRule,
    Step,
    V,
    guard,
    let,
    op,
    through,
)
from qfuse.rewrite.pattern.guards import check, single_use
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rewriter, arguments, aten

_BATCHED = 3
# In float16 the product without its scales may overflow where the weights do not.
_DTYPES = (torch.float32, torch.float64, torch.bfloat16)

X, BY = V("x", rank=_BATCHED), Operand("scale")
PRODUCT, VALUE = Capture[Node]("product"), Capture[Node]("value")
TURNED = Capture[Path]("turned")
SCALE_FACTOR = Capture[Factor]("scale_factor")
ZERO_FACTOR = Capture[Factor | None]("zero_factor")


def _transposed(node: Node) -> Node | None:
    return transpose_source(node, _BATCHED)


_TRANSPOSE = Step("transpose", _transposed)


@guard(MissCode.NOT_CONSTANT, "the weights are computed at run time", at="q")
def _is_constant(q: Node) -> bool:
    return moved_constant(q) is not None


def _refuse_calls(product: Node, x: Node, q: Node, value: Node) -> Miss | None:
    # Without linears the product would dequantize all weights in every call.
    known = moved_constant(q)
    assert known is not None, "the weights are constant"
    return refuse_calls(product, x, known[1].reshape([int(size) for size in shape_of(value)]))


@guard(MissCode.SHAPE, "the weights have the shape {value.shape}, expected three axes", at="value")
def _is_batched(value: Node) -> bool:
    return len(shape_of(value)) == _BATCHED


@guard(MissCode.ZERO_POINT, "{q.dtype} values have no zero point", at="q")
def _may_be_shifted(q: Node, zero: Argument) -> bool:
    return zero is None or not dtype_of(q).is_floating_point


@guard(MissCode.DTYPE, "the factor changes the shape or the dtype of the product", at="product")
def _keeps_type(node: Node, product: Node) -> bool:
    same = dtype_of(node) == dtype_of(product)
    return same and same_shape(shape_of(node), shape_of(product))


def _scale_factor(
    node: Node, product: Node, value: Node, scale: Argument, turned: Path
) -> Factor | Miss:
    """Return the factor in the order of axes of the weights, one entry per output at most."""
    if isinstance(scale, Node):
        grid = padded(shape_of(scale), _BATCHED)
        # By position and not by size: with as many rows as features, one per row looks the same.
        if len(grid) != _BATCHED or not is_one(grid[1]):
            text = "a factor of shape {} on a result of shape {} is not one number per output"
            shapes = tuple(shape_of(scale)), tuple(shape_of(product))
            return Miss(MissCode.AXIS, scale, text, *shapes)
    odd = len(turned.steps) % 2 == 1
    batch, first, second = shape_of(value)
    shape = (batch, second, first) if odd else (batch, first, second)
    found = scale_factor(node, scale, shape, torch.float32)
    if isinstance(found, Miss):
        return found
    if found.value is None:
        return Miss(MissCode.NOT_CONSTANT, found.home, "the factor is computed at run time")
    if not odd:
        return found
    moved = found.value.transpose(1, 2).contiguous()
    return Factor(found.home, tuple(moved.shape), moved, found.what)


@guard(MissCode.RANGE, "scaled weights would not be normal numbers of {value.dtype}", at="product")
def _is_in_range(value: Node, q: Node, scale_factor: Factor, zero: Argument) -> bool:
    spec = full_range_spec(q, (None,) * _BATCHED, dtype_of(value))
    known = scale_factor.value
    assert known is not None, "the factor is a constant"
    return check_range(value, known, spec, shifted=zero is not None) is None


def _zero_factor(node: Node, q: Node, zero: Argument, scale_factor: Factor) -> Factor | Miss | None:
    return exact_zero_factor(node, q, zero, scale_factor)


_WEIGHTS = through(QUANTIZED.named("value"), _TRANSPOSE, path=TURNED)
_PRODUCT = Either(op(aten.bmm.default, X, _WEIGHTS), op(aten.matmul.default, X, _WEIGHTS)).named(
    "product"
)


class LiftBatchedScale(PatternRule):
    """``bmm(x, cast(w)) * scale`` becomes ``bmm(x, dequantize(w, scale))``.

    Before::

        x [E, M, K], w int8 [E, K, N] -> cast -> bmm -> mul(scale [E, 1, N])

    After::

        x, w -> qfuse.dequantize(scale) -> bmm

    The scale is one number, one per weight of the batch, one per output feature, or both. A zero
    point that is subtracted from the weights is that of the dequantize.

    Rounding: the scales move from each sum to its terms; a dtype of 16 bits rounds each scaled
    weight.

    Refuses: weights that are not constant, or not worth a linear each; a factor that is computed at
    run time, or is not one number per output; a product that has other users, or computes in
    float16, where it may overflow; scales that take the weights out of the normal range.
    """

    name = "lift-batched-scale"
    exactness = Exactness.ROUNDING
    pattern = (
        (_PRODUCT.given(_is_batched).core() * BY)
        .giving(*_DTYPES)
        .given(
            _is_constant, check(_refuse_calls), single_use("product"), _keeps_type, _may_be_shifted
        )
        .given(let(SCALE_FACTOR, _scale_factor), _is_in_range, let(ZERO_FACTOR, _zero_factor))
    )

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Dequantize the weights, transpose them again, and multiply."""
        stored, scale, zero = QuantizedValues.of(site), site[SCALE_FACTOR], site[ZERO_FACTOR]
        product, value = site[PRODUCT], site[VALUE]
        with rw.before(site.node):
            q = stored.build(rw)
            block = block_of(shape_of(value), scale.shape)
            assert block is not None, "the scale tiles the weights"
            spec = full_range_spec(q, block, dtype_of(value))
            made = None if zero is None else zero.build(rw)
            real = rw.call(ops.dequantize, q, scale.build(rw), made, str(spec))
            for step in site[TURNED].of(_TRANSPOSE):
                rest = [v for k, v in arguments(step).items() if k != "self"]
                real = rw.call(step.target, real, *rest)  # type: ignore[arg-type]
            y = rw.call(product.target, site[X], real)  # type: ignore[arg-type]
        rw.replace(site.node, y)
