"""Turn a product of quantized operands, scaled and corrected afterwards, into a linear on them."""

from __future__ import annotations

from qfuse.ir.dtypes import COMPUTE_DTYPES
from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.linear import as_linear
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.sizes import same_shape
from qfuse.normalize.aten.int_matmul.correction import multiplied
from qfuse.normalize.aten.int_matmul.products import as_int_product
from qfuse.normalize.aten.int_matmul.scaled import STEPS, ScaledProduct, as_scaled_product
from qfuse.normalize.aten.linear.weights import call_linear
from qfuse.normalize.match.constants import derived
from qfuse.normalize.match.views import reapply_views
from qfuse.rewrite.pattern import (
    ANY,
    Capture,
    Either,
    Match,
    Path,
    PatternRule,
    Read,
    Step,
    let,
    through,
)
from qfuse.rewrite.pattern.guards import single_use
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rewriter, arguments, aten

PATH, SCALED = Capture[Path]("path"), Capture[ScaledProduct]("scaled")
# Bounds the walk behind each product, which `match` repeats at every factor.
_LONGEST = 12
_ONE_USER = single_use("path", text="the unscaled result has other users")


def unscaled(node: Node) -> ScaledProduct | None:
    """View ``node`` as a product of which an operand has no scale yet."""
    found = as_scaled_product(node)
    takes = found is not None and (found.takes_row_scale or found.weight.is_open)
    return found if takes else None


def _uncorrected(node: Node) -> ScaledProduct | None:
    found = as_scaled_product(node)
    return found if found is not None and found.takes_correction else None


def _integers(node: Node) -> ScaledProduct | None:
    return as_scaled_product(node) if as_int_product(node) is not None else None


def _read(node: Node, product: ScaledProduct, path: Path) -> ScaledProduct | Miss:
    """Match ``node``, and the scales and corrections applied to it."""
    found = product.then(path, node)
    if isinstance(found, Miss):
        return found
    # What follows a refused factor stays in the graph after the linear, so a miss only ends the
    # walk.
    while (behind := _behind(found.node)) is not None:
        more = found.then(*behind)
        if isinstance(more, Miss):
            break
        found = more
    if found.float_dtype is None:
        return Miss(MissCode.PATTERN, found.node, "the product is not scaled")
    return found


def _behind(node: Node) -> tuple[Path, Node] | None:
    """Return the factor or correction that is the only user, and the ops in between."""
    steps: tuple[tuple[Step, Node], ...] = ()
    top = node
    # An intermediate value with another user has to stay as it is, so the linear ends before it.
    while len(top.users) == 1 and len(steps) < _LONGEST:
        (user,) = top.users
        kind = next((k for k in STEPS if k.source(user) is top), None)
        if kind is None:
            return (Path(node, steps), user) if _continues(user, top) else None
        steps = (*steps, (kind, user))
        top = user
    return None


def _continues(user: Node, y: Node) -> bool:
    if is_call(user, aten.mul.Tensor):
        return dtype_of(user) in COMPUTE_DTYPES
    if not is_call(user, aten.sub.Tensor):
        return False
    a = arguments(user)
    # `sum - y` is not a correction of `y`, and with another `alpha` it is not one by its zero
    # point.
    return a["self"] is y and a["other"] is not y and bool(a["alpha"] == 1)


class FuseScaledProduct(PatternRule):
    """``mm(x, w)`` that is scaled and corrected becomes ``linear(dequantize(x), dequantize(w))``.

    Before::

        x int8, w int8 -> mm int32 -> cast -> mul(x_scale) -> view -> mul(w_scale) -> sub(...)

    After::

        x -> qfuse.dequantize(x_scale, zero) --+
        w -> qfuse.dequantize(w_scale) --------+-> linear -> cast, view

    The product is one of integers, in any spelling, or a linear on casts of quantized values, or on
    values that are dequantized with the scale 1; a weight-only linear may have any float input.
    The factors and corrections may be in any order and on any side, with casts and views of rows
    between them: a scale per row goes to the activation, one per output feature to the weight,
    a scalar to the operand without a scale, a product of both to both. The activation is the tensor
    that was quantized, of any rank, if there are only views in between. A correction subtracts
    ``zero_point * sum(w)`` from integers, or ``zero_point * scales * sum(w)`` from floats. A bias
    inside is scaled.

    Rounding: the scales move from each sum to its terms, where half dtypes round each scaled
    weight, and two large sums no longer cancel. A kernel for the result sums integers again. A
    known scale that takes a weight out of the normal range is refused: the error would exceed
    rounding.

    Refuses: a factor that is neither per row, per output feature, nor a scalar; a scale per output
    feature or a bias inside that is computed at run time; an intermediate result with other users,
    or in float16, where it may overflow; scale and zero point of different blocks; a correction by
    anything but zero point, scales, and sums over K.
    """

    name = "fuse-scaled-product"
    exactness = Exactness.ROUNDING
    pattern = Either(
        (through(Read("product", unscaled, "product").core(), *STEPS, path=PATH) * ANY)
        .giving(*COMPUTE_DTYPES)
        .given(_ONE_USER, let(SCALED, _read)),
        (
            through(Read("product", _uncorrected, "product"), *STEPS, path=PATH)
            - Read("factors", multiplied, "product").core()
        ).given(_ONE_USER, let(SCALED, _read)),
        # A product that is only shifted is left to `int-mm-shift`, which is exact.
        (through(Read("product", _integers, "product"), path=PATH) - ANY).given(let(SCALED, _read)),
        (through(Read("product", _integers, "product"), path=PATH) + ANY).given(let(SCALED, _read)),
    )

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Dequantize both operands, multiply, and reapply the ops in between."""
        found = site[SCALED]
        assert found.float_dtype is not None, "it is scaled"
        linear, x = as_linear(found.base), found.x
        with rw.before(found.node):
            if x is None:
                assert found.activation is not None, "it has quantized values"
                x = found.activation.build(rw, found.float_dtype)
            weight, bias = found.weight.build(rw), found.bias
            if bias is not None and found.bias_value is not None:
                bias = derived(rw, bias, found.bias_value, "scaled")
            same = linear is not None and same_shape(shape_of(x), shape_of(linear.x))
            like = found.base if same else None
            y = call_linear(rw, x, weight, bias, like=like)
            if dtype_of(y) != dtype_of(found.node):
                y = rw.call(aten._to_copy.default, y, dtype=dtype_of(found.node))
            for view in found.views:
                y = reapply_views(rw, view, y)
        rw.replace(found.node, y)
