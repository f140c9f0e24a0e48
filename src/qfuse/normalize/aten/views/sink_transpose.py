"""Move the transpose of an integer product below the casts and factors that follow it."""

from __future__ import annotations

from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.linear import as_linear
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.sizes import is_one
from qfuse.normalize.aten.int_matmul.products import as_int_product
from qfuse.normalize.match.views import transpose_source
from qfuse.rewrite.pattern import Arg, Either, Match, Operand, PatternRule, Read, guard, op
from qfuse.rewrite.prelude import Exactness, MissCode, Node, Rewriter, arguments, aten

_MATRIX = 2
# Casts and factors between a product and its transpose.
_STEPS = 8


def _turned(node: Node) -> Node | None:
    """Return the matrix that ``node`` transposes, if it is computed from a quantized product."""
    source = transpose_source(node)
    top = source
    for _ in range(_STEPS):
        if top is None or as_int_product(top) is not None:
            return source if top is not None else None
        linear = as_linear(top)
        if linear is not None:
            is_quantized = as_dequantize(linear.x) is not None
            return source if is_quantized and as_dequantize(linear.weight) is not None else None
        if is_call(top, aten.mul.Tensor):
            a = arguments(top)
            operands = [n for n in (a["self"], a["other"]) if isinstance(n, Node)]
            top = next((n for n in operands if shape_of(n) == shape_of(top)), None)
        else:
            top = cast_source(top)
    return None


MATRIX, FACTOR = Read("matrix", _turned, "transposed product").core(), Operand("factor")


@guard(MissCode.SHAPE, "a factor of shape {factor.shape} is not one number per row or column")
def _is_factor(node: Node, factor: object) -> bool:
    # Transposing a whole matrix would be a pass over memory.
    if not isinstance(factor, Node):
        return True
    shape = shape_of(factor)
    return len(shape_of(node)) == _MATRIX and (
        not shape or any(map(is_one, shape)) or len(shape) == 1
    )


class SinkTranspose(PatternRule):
    """``t(y) * s`` becomes ``t(y * t(s))``, and ``cast(t(y))`` becomes ``t(cast(y))``.

    Before::

        product -> t -> cast -> mul(column)

    After::

        product -> cast -> mul(row) -> t

    Exact: each element is computed as before.

    Refuses: the transpose of anything but a product of quantized values; a factor that is a matrix.
    """

    name = "sink-transpose"
    exactness = Exactness.EXACT
    pattern = Either(
        op(aten.mul.Tensor, MATRIX, FACTOR).given(_is_factor),
        op(aten._to_copy.default, MATRIX, dtype=Arg("dtype")),
    )

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Compute on the matrix, and transpose the result."""
        matrix = site[MATRIX]
        if is_call(site.node, aten._to_copy.default):
            y = rw.call(aten._to_copy.default, matrix, dtype=dtype_of(site.node))
        else:
            factor = site[FACTOR]
            if isinstance(factor, Node):
                factor = _transposed(rw, factor)
            y = rw.call(aten.mul.Tensor, matrix, factor)
        rw.replace(site.node, rw.call(aten.t.default, y))


def _transposed(rw: Rewriter, factor: Node) -> Node:
    shape = shape_of(factor)
    if not shape:
        return factor
    if len(shape) == 1:
        return rw.call(aten.unsqueeze.default, factor, 1)
    source = transpose_source(factor)
    return rw.call(aten.t.default, factor) if source is None else source
