"""An activation, optionally times a gate, with the roundings around it, as epilogue ops."""

from __future__ import annotations

from dataclasses import dataclass

from qfuse.ir.graph.stage_graph import constant_of, op_name
from qfuse.ir.movement.glu_halves import glu_split_of
from qfuse.ir.movement.registry import movement_of
from qfuse.ir.movement.slice import Slice
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.epilogue import Act, Cast, Epilogue, EpilogueOp, Glu, Mul, Round
from qfuse.ir.ops.product import as_fused_product
from qfuse.ir.ops.qdq import as_dequantize, as_quantize
from qfuse.ir.ops.views import QuantParams, dtype_of, shape_of
from qfuse.ir.sizes import same_shape
from qfuse.patterns.activations import ACTIVATION, activation_of
from qfuse.patterns.casts import FLOAT_CAST
from qfuse.rewrite import pattern as pt
from qfuse.rewrite.pattern import (
    Capture,
    Either,
    Match,
    Path,
    Read,
    V,
    Via,
    check,
    guard,
    let,
    op,
    through,
)
from qfuse.rewrite.prelude import Miss, MissCode, Node, aten


@dataclass(frozen=True, slots=True)
class Gated:
    """The computation of an activation.

    Attributes:
        x: Its operand.
        steps: The epilogue ops.
        extras: The epilogue operands, to which the ops refer by index.
    """

    x: Node
    steps: tuple[EpilogueOp, ...] = ()
    extras: tuple[Node, ...] = ()

    @property
    def epilogue(self) -> Epilogue:
        """The epilogue ops as an epilogue."""
        return Epilogue(self.steps)

    def then(self, step: EpilogueOp, *extras: Node) -> Gated:
        """Return this with one more epilogue op."""
        return Gated(self.x, (*self.steps, step), (*self.extras, *extras))

    def rounded(self, path: Path | None) -> Gated:
        """Return this with all roundings on a path, in order."""
        found = self
        for _, node in () if path is None else path.steps:
            params = _trip(node)
            if params is None:
                found = found.then(Cast(dtype_of(node)))
            else:
                step, extras = _round(params, len(found.extras))
                found = found.then(step, *extras)
        return found

    def times(self, up: Path) -> Gated:
        """Return this times ``up``, or times the value that ``up`` rounds."""
        # A factor takes one rounding; after casts as well, the rounded tensor itself is the factor.
        params = _trip(up.top) if len(up.steps) == 1 else None
        at = len(self.extras)
        # Its other users need the rounded tensor anyway, so it is read instead of computed again.
        if params is None or _has_other_users(up.top):
            return self.then(Mul(at), up.top)
        step, extras = _round(params, at + 1)
        return self.then(Mul(at, step), up.base, *extras)


def _trip(y: Node) -> QuantParams | None:
    """Return the static parameters of the round trip that ``y`` ends, if it ends one.

    An epilogue op has scales of one level: with two, ``y`` is treated as any other value.
    """
    dequantize = as_dequantize(y)
    quantize = None if dequantize is None else as_quantize(dequantize.q)
    if dequantize is None or quantize is None or not quantize.params.same_as(dequantize.params):
        return None
    params = quantize.params
    if params.outer_scale is not None:
        return None
    # Parameters that are computed at run time may depend on the whole tensor that is to be rounded.
    known = [p is None or constant_of(p) is not None for p in (params.scale, params.zero_point)]
    return params if all(known) else None


def _trip_source(y: Node) -> Node | None:
    return None if _trip(y) is None else y.all_input_nodes[0].all_input_nodes[0]


def _two_level_source(y: Node) -> Node | None:
    dequantize = as_dequantize(y)
    quantize = None if dequantize is None else as_quantize(dequantize.q)
    return None if quantize is None or quantize.params.outer_scale is None else quantize.x


def _activated_product(node: Node) -> Node | None:
    """Return a linear or convolution with a float result and an activation in its epilogue."""
    fused = as_fused_product(node)
    own = () if fused is None or fused.out_params is not None else fused.epilogue.ops
    return node if any(isinstance(step, Act) for step in own) else None


def _round(params: QuantParams, at: int) -> tuple[Round, tuple[Node, ...]]:
    """Return the epilogue op whose parameters are the extras from index ``at`` on."""
    if params.zero_point is None:
        return Round(at, None, params.spec), (params.scale,)
    return Round(at, at + 1, params.spec), (params.scale, params.zero_point)


def _has_other_users(up: Node) -> bool:
    """Whether the result of a round trip, or its quantized values, have other users."""
    return len(up.users) > 1 or len(up.all_input_nodes[0].users) > 1


X, ACT = V("x"), Capture[Act]("act")
GATE, UP = Capture[Node]("gate"), Capture[Node]("up")
GATED = Capture[Gated]("gated")
_ACTIVATED = Read[Node]("product", _activated_product, "linear or convolution with an activation")
# The roundings before and after the activation, on the other factor, and after the product.
_BEFORE, _BEHIND = Capture[Path]("before"), Capture[Path]("behind")
_OTHER, _LAST = Capture[Path]("other"), Capture[Path]("last")

_TRIP = pt.Step("quantize and dequantize", _trip_source, (ops.dequantize,))
_TWO_LEVELS = pt.Step("quantize in two levels", _two_level_source, (ops.dequantize,))
_ROUNDINGS = FLOAT_CAST, _TRIP


@guard(MissCode.DTYPE, "the activation has an input of {x.dtype}")
def _is_float(x: Node) -> bool:
    return dtype_of(x).is_floating_point


@guard(
    MissCode.GRANULARITY,
    "the activation is rounded with scales of a second level, which no epilogue op supports",
)
def _has_one_level() -> bool:
    return False


def _act(node: Node) -> Act | Miss:
    text = "{} with these arguments is not an activation of the fused op"
    return activation_of(node) or Miss(MissCode.ARGUMENT, node, text, op_name(node))


def _refuse_factors(node: Node, gate: Node, up: Node) -> Miss | None:
    if up is gate:
        return Miss(MissCode.SHARED, node, "the activation is multiplied by itself")
    for factor in (gate, up):
        if not same_shape(shape_of(factor), shape_of(node)):
            text = "a factor of shape {} broadcasts to {}"
            sizes = tuple(shape_of(factor)), tuple(shape_of(node))
            return Miss(MissCode.SHAPE, factor, text, *sizes)
    if not dtype_of(up).is_floating_point:
        return Miss(MissCode.DTYPE, up, "the other factor is {}", dtype_of(up))
    return None


def _gated(match: Match, node: Node) -> Gated | Miss:
    activated = match.get(_ACTIVATED)
    if activated is None:
        found = Gated(match[X]).rounded(match[_BEFORE]).then(match[ACT])
        found = found.rounded(match.get(_BEHIND))
    else:
        found = Gated(activated)
    if UP in match:
        # First, since a GLU of one tensor reads no second operand.
        found = _halves(found, match[UP]) or found.times(match[_OTHER])
    return _shared(node, found) or found.rounded(match.get(_LAST))


def _halves(found: Gated, up: Node) -> Gated | None:
    """View an activation of one half of a tensor, times the other half, as one epilogue op."""
    # A GLU step has no place for roundings between the activation and the product.
    act = found.steps[0] if len(found.steps) == 1 else None
    halves = glu_split_of(found.x, up)
    if halves is None or not isinstance(act, Act):
        return None
    return Gated(halves.source, (Glu(act, halves.order),))


def _shared(y: Node, found: Gated) -> Miss | None:
    """Refuse values between the operand of the activation and ``y`` that have other users."""
    stack, parts = [y], any(isinstance(step, Glu) for step in found.steps)
    while stack:
        node = stack.pop()
        for value in node.all_input_nodes:
            # Constants have other users without being computed for them.
            end = value is found.x or value in found.extras or constant_of(value) is not None
            # Both halves are results of one split, so it has two users.
            if end or (parts and isinstance(movement_of(value), Slice)):
                continue
            others = sorted({op_name(user) for user in value.users if user is not node})
            if others:
                text = "{} is also used by {}"
                details = op_name(value), ", ".join(others)
                return Miss(MissCode.SHARED, value, text, *details)
            stack.append(value)
    return None


_INPUT = through(X.given(_is_float), FLOAT_CAST, path=_BEFORE)
_ACTIVATION = Either(
    Via(_INPUT, ACTIVATION).core().given(let(ACT, _act)),
    # Matched only to be refused with its reason.
    Via(through(Via(V(""), ACTIVATION).core(), *_ROUNDINGS), _TWO_LEVELS).given(_has_one_level),
)
# The other factor first: a product with a number does not have one, so it is no near miss.
_PRODUCT = op(
    aten.mul.Tensor,
    other=through(V(""), *_ROUNDINGS, path=_OTHER).named(UP.label),
    self=Either(through(_ACTIVATION, *_ROUNDINGS, path=_BEHIND), _ACTIVATED.core()).named(
        GATE.label
    ),
).given(check(_refuse_factors))

A_PRODUCT = _PRODUCT.given(let(GATED, _gated))
"""``act(g) * u`` with roundings in between: ``GATED``. If both factors match, the left is the gate.

Intermediate values have no other users. Activations in the epilogue of a fused op are
left there.
"""

A_GATED = through(Either(_ACTIVATION, _PRODUCT), *_ROUNDINGS, path=_LAST).given(let(GATED, _gated))
"""``act(x)`` or ``act(g) * u`` with roundings in between and after: ``GATED``."""
