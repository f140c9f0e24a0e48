"""Fuse the quantization of an activation's result into the activation."""

from __future__ import annotations

from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.activation import Activation
from qfuse.ir.ops.epilogue import Mul
from qfuse.ir.ops.output import ExtraOutput, Output
from qfuse.ir.ops.product import as_fused_product
from qfuse.ir.ops.qdq import as_quantize
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.sizes import same_shape, same_size
from qfuse.optimize.fuse.epilogue_operand import EpilogueOperand, stored_operand
from qfuse.optimize.fuse.operands import stored_edge
from qfuse.optimize.fuse.quantized_output import (
    ExtraValue,
    FuseQuantizeSite,
    QuantizedResult,
    fuse_site,
    quantized,
    quantized_result,
)
from qfuse.patterns.gated import A_GATED, GATED, Gated
from qfuse.rewrite.pattern import (
    Capture,
    Either,
    Match,
    PatternRule,
    Read,
    check,
    guard,
    let,
    match,
)
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rewriter, arguments, aten

_MATRIX = 2
# Bounds the search from a quantize through round trips and casts to the product.
_STEPS = 8


_SITE = Capture[FuseQuantizeSite]("site")


def _site(gated: Gated, result: QuantizedResult) -> FuseQuantizeSite | Miss:
    y, params = result.quantize.x, result.quantize.params
    own = ExtraValue(ExtraOutput.FLOAT, y, frozenset(result.ends))
    # Without epilogue ops the float result is the op's own input, whose other users are unaffected.
    kept = (own,) if own.users and gated.steps else ()
    keep = frozenset(k.what for k in kept)
    # Two specs: how the values are quantized, and how their parameters are chosen.
    chosen = None if result.choose is None else (params.spec, result.choose.spec)
    fused = Activation(
        result.quantize.node,
        *stored_edge(gated.x),
        gated.epilogue,
        gated.extras,
        Output(params if chosen is None else None, chosen, keep),
    )
    return fuse_site(fused, result, kept)


def _float_product(node: Node) -> Gated | None:
    """View a fused op with a float result, for which this op may choose parameters."""
    fused = as_fused_product(node)
    # With parameters of its own it returns quantized values, and there is nothing to choose for.
    return None if fused is None or fused.out_params is not None else Gated(node)


def _scaled_channels(node: Node) -> Gated | None:
    """View an image times a gate that broadcasts to its pixels, as in squeeze-excite.

    The image is what a fused op or a dequantize returns, and may be either factor.
    """
    if not is_call(node, aten.mul.Tensor):
        return None
    a = arguments(node)
    factors = a["self"], a["other"]
    for x, gate in (factors, factors[::-1]):
        if isinstance(x, Node) and isinstance(gate, Node) and _is_scaled_by(x, gate, node):
            factor = stored_operand(gate) or EpilogueOperand(gate)
            return Gated(x).then(Mul(0, stored=factor.stored(0)), *factor.nodes)
    return None


def _is_scaled_by(x: Node, gate: Node, product: Node) -> bool:
    """Whether ``x`` is an image of quantized values, and ``gate`` has one value for its pixels."""
    if not is_call(x, ops.dequantize) and as_fused_product(x) is None:
        return False
    if not dtype_of(gate).is_floating_point or not same_shape(shape_of(x), shape_of(product)):
        return False
    sizes = shape_of(gate)
    return len(shape_of(x)) > _MATRIX and len(sizes) >= _MATRIX and same_size(sizes[-1], 1)


@guard(MissCode.PATTERN, "there is no activation to compute")
def _is_work(quantize: Node) -> bool:
    view = as_quantize(quantize)
    result = None if view is None else quantized_result(view)
    # A static quantize is fused into the linear or convolution itself; only a choice needs this op.
    chooses = not isinstance(result, QuantizedResult) or result.choose is not None
    return chooses or _product_of(quantize) is not None


def _refuse_taken(quantize: Node) -> Miss | None:
    product = _product_of(quantize)
    if product is None:
        return None
    return Miss(MissCode.ORDER, product, "it is fused into {}", op_name(product))


def _product_of(node: Node) -> Node | None:
    """Return the quantize of a product that fuses this one as one of its epilogue ops."""
    between = (ops.dequantize, aten.mul.Tensor, aten._to_copy.default)
    last = node
    for _ in range(_STEPS):
        # A choice of parameters goes together with its quantize.
        users = [each for each in last.users if not is_call(each, ops.choose_qparams)]
        if len(users) != 1:
            return None
        (user,) = users
        if is_call(user, ops.quantize):
            return user if _takes(user, node) else None
        if not is_call(user, *between):
            return None
        last = user
    return None


def _takes(quantize: Node, node: Node) -> bool:
    """Whether the op that fuses ``quantize`` also computes ``node``."""
    taken = match(_PRODUCTS, quantize)
    if isinstance(taken, Miss):
        return False
    found, y = taken[GATED], taken[_SITE].result.quantize.x
    # Search from the quantize back to the operands of the op that fuses it.
    ends, stack, seen = {found.x, *found.extras}, [y], {y}
    while stack:
        value = stack.pop()
        if value is node:
            return True
        # What feeds the op is computed by others.
        if value not in ends:
            new = [source for source in value.all_input_nodes if source not in seen]
            seen.update(new)
            stack += new
    return False


_PRODUCTS = quantized(A_GATED).given(let(_SITE, _site))
_FUSED = Read[Gated](GATED.label, _float_product, "linear or convolution").given(_is_work).core()
_SCALED = Read[Gated](GATED.label, _scaled_channels, "image times a gate").core()


class FuseActivationQuantize(PatternRule):
    """``quantize(act(g) * u)`` becomes ``qfuse.activation``, which loads ``g`` and ``u`` once.

    Before::

        g -> silu --.                .-- choose_qparams --.
                    +-- mul -- cast -+-- quantize ---------+-- user
        u ----------'

    After::

        g, u -> qfuse.activation -- user

    The same for an image of quantized values times a gate that broadcasts to its pixels, with or
    without an activation, as in squeeze-excite. The gate depends on the image, so the product is
    no epilogue op of the convolution.

    Parameters may be static or dynamic. Two halves of one tensor become the epilogue op ``glu`` of
    the whole tensor. A dequantize of the input is fused too; casts and quantize/dequantize round
    trips stay where the source rounds. The float result is an extra output if it has other users.

    Refuses: a clamp with bounds that cross; parameters that are computed from the result
    otherwise than by a choice for it; other operands that broadcast, or are not floats; an
    intermediate value with other users; strides that would change. Scales of two levels are not
    fused. An activation that only rounds in front of a product is left to the product's
    quantize. An activation that is already in the epilogue of a linear or convolution stays there;
    only the dynamic quantization of the result is fused.
    """

    name = "fuse-activation-quantize"
    exactness = Exactness.EXACT
    pattern = quantized(Either(A_GATED, _FUSED, _SCALED).given(check(_refuse_taken))).given(
        let(_SITE, _site)
    )

    def rewrite(self, site: Match, rw: Rewriter) -> None:
        """Insert the op in front of the first user of its results."""
        site[_SITE].insert(rw)
