"""An activation with the roundings around it, alone or times a gate, as steps of an epilogue."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import constant_of, op_name
from qfuse.ir.movement.glu_halves import halves_of
from qfuse.ir.movement.registry import movement_of
from qfuse.ir.movement.slice import Slice
from qfuse.ir.ops.epilogue import Act, Cast, Epilogue, Glu, Mul, Round, Step
from qfuse.ir.ops.linear import as_fused_linear
from qfuse.ir.ops.qdq import as_dequantize, as_quantize
from qfuse.ir.ops.views import QuantParams, dtype_of, shape_of
from qfuse.ir.sizes import same_shape
from qfuse.optimize.match.activations import ACTIVATION_OPS, activated, activation_of
from qfuse.optimize.match.casts import cast_source
from qfuse.rewrite.prelude import Miss, MissCode, Node, arguments

_MUL = torch.ops.aten.mul.Tensor
_STEPS = 8

_Rounding = Cast | QuantParams


@dataclass(frozen=True, slots=True)
class Gated:
    """What an activation computes.

    Attributes:
        x: What it reads.
        steps: The steps of its epilogue.
        extras: What the steps name by number.
    """

    x: Node
    steps: tuple[Step, ...] = ()
    extras: tuple[Node, ...] = ()

    @property
    def epilogue(self) -> Epilogue:
        """The steps."""
        return Epilogue(self.steps)

    def then(self, step: Step, *extras: Node) -> Gated:
        """Return this with one more step."""
        return Gated(self.x, (*self.steps, step), (*self.extras, *extras))

    def rounded(self, roundings: Iterable[_Rounding]) -> Gated:
        """Return this with every rounding, one after the other."""
        found = self
        for rounding in roundings:
            if isinstance(rounding, Cast):
                found = found.then(rounding)
            else:
                step, extras = _round(rounding, len(found.extras))
                found = found.then(step, *extras)
        return found

    def times(self, up: Node) -> Gated:
        """Return this times ``up``, or times what ``up`` rounds."""
        roundings, source = _roundings(up)
        if len(roundings) == 1 and isinstance(roundings[0], QuantParams) and not _is_read(up):
            at = len(self.extras)
            step, extras = _round(roundings[0], at + 1)
            return self.then(Mul(at, step), source, *extras)
        return self.then(Mul(len(self.extras)), up)


def gated(y: Node, reader: Node) -> Gated | Miss:
    """View ``y`` as ``act(x)`` or ``act(g) * u``, with casts and other roundings in between.

    What a linear has in its epilogue is left there: a linear has no steps.

    Args:
        y: Who else reads it does not matter; what is on the way to it, nobody else may read.
        reader: Where a refusal is told.
    """
    roundings, source = _roundings(y)
    if is_call(source, *ACTIVATION_OPS):
        found = _activation(source)
    elif is_call(source, _MUL):
        found = _product(source)
    elif _is_linear(y):
        return Gated(y)
    else:
        none = Miss(MissCode.PATTERN, reader, "it quantizes no activation", progress=0)
        return _second_level(source) or none
    if isinstance(found, Miss):
        return found
    return _shared(y, found) or found.rounded(roundings)


def _roundings(y: Node) -> tuple[list[_Rounding], Node]:
    """Return the casts and the trips to stored numbers that end in ``y``, and what they round."""
    found: list[_Rounding] = []
    while len(found) < _STEPS:
        source, params = cast_source(y), _trip(y)
        if source is not None:
            found.insert(0, Cast(dtype_of(y)))
            y = source
        elif params is not None:
            found.insert(0, params)
            y = y.all_input_nodes[0].all_input_nodes[0]
        else:
            break
    return found, y


def _casts(y: Node) -> tuple[list[_Rounding], Node]:
    """Return the casts that end in ``y``, and what the first of them casts."""
    found: list[_Rounding] = []
    while len(found) < _STEPS and (source := cast_source(y)) is not None:
        found.insert(0, Cast(dtype_of(y)))
        y = source
    return found, y


def _trip(y: Node) -> QuantParams | None:
    """Return the given parameters with which ``y`` was quantized and dequantized, if it was.

    A step has scales of one level: with two, ``y`` is a value like any other.
    """
    dequantize = as_dequantize(y)
    quantize = None if dequantize is None else as_quantize(dequantize.q)
    if dequantize is None or quantize is None or not quantize.params.same_as(dequantize.params):
        return None
    params = quantize.params
    if params.outer_scale is not None:
        return None
    known = [p is None or constant_of(p) is not None for p in (params.scale, params.zero_point)]
    return params if all(known) else None


def _round(params: QuantParams, at: int) -> tuple[Round, tuple[Node, ...]]:
    """Return the step of which the parameters are the extras from number ``at`` on."""
    if params.zero_point is None:
        return Round(at, None, params.spec), (params.scale,)
    return Round(at, at + 1, params.spec), (params.scale, params.zero_point)


def _second_level(y: Node) -> Miss | None:
    """Refuse an activation that is rounded with scales of two levels on the way."""
    dequantize = as_dequantize(y)
    quantize = None if dequantize is None else as_quantize(dequantize.q)
    if quantize is None or quantize.params.outer_scale is None:
        return None
    if not is_call(_roundings(quantize.x)[1], *ACTIVATION_OPS):
        return None
    text = "the activation is rounded with scales of a second level, which a step has not"
    return Miss(MissCode.GRANULARITY, y, text, progress=3)


def _is_read(up: Node) -> bool:
    """Whether others read a value that was quantized and dequantized, or its stored numbers."""
    return len(up.users) > 1 or len(up.all_input_nodes[0].users) > 1


def _activation(node: Node) -> Gated | Miss:
    act = activation_of(node)
    if act is None:
        text = "{} with these arguments is not an activation of the fused op"
        return Miss(MissCode.ARGUMENT, node, text, op_name(node), progress=3)
    casts, x = _casts(activated(node))
    if not dtype_of(x).is_floating_point:
        text = "the activation reads {}"
        return Miss(MissCode.DTYPE, x, text, dtype_of(x), progress=3)
    return Gated(x).rounded(casts).then(act)


def _product(node: Node) -> Gated | Miss:
    """View a product of which one side is an activation; the left one if both are."""
    a = arguments(node)
    sides = [a["self"], a["other"]]
    closest = Miss(MissCode.PATTERN, node, "neither factor is an activation", progress=0)
    for gate, up in (sides, sides[::-1]):
        if not isinstance(gate, Node) or not isinstance(up, Node):
            continue
        found = _gate(gate)
        if found is None:
            continue
        found = found if isinstance(found, Miss) else _times(node, gate, up, found)
        if isinstance(found, Gated):
            return found
        closest = max(closest, found, key=lambda miss: miss.progress)
    return closest


def _gate(node: Node) -> Gated | Miss | None:
    """View a factor as an activation, or as that of a linear which has it in its epilogue."""
    roundings, source = _roundings(node)
    if is_call(source, *ACTIVATION_OPS):
        found = _activation(source)
        return found if isinstance(found, Miss) else found.rounded(roundings)
    return Gated(node) if _is_activated(node) else _second_level(source)


def _is_linear(node: Node) -> bool:
    """Whether a fused linear gives a float, whose rows its kernel may choose parameters for."""
    linear = as_fused_linear(node)
    return linear is not None and linear.out_params is None


def _is_activated(node: Node) -> bool:
    """Whether a linear gives a float with an activation in its epilogue."""
    linear = as_fused_linear(node)
    own = () if linear is None or linear.out_params is not None else linear.epilogue.steps
    return any(isinstance(step, Act) for step in own)


def _times(node: Node, gate: Node, up: Node, found: Gated) -> Gated | Miss:
    """Multiply by ``up``."""
    if up is gate:
        return Miss(MissCode.SHARED, node, "the activation is multiplied by itself", progress=3)
    for factor in (gate, up):
        if not same_shape(shape_of(factor), shape_of(node)):
            text = "a factor of shape {} is spread over {}"
            sizes = tuple(shape_of(factor)), tuple(shape_of(node))
            return Miss(MissCode.SHAPE, factor, text, *sizes, progress=3)
    if not dtype_of(up).is_floating_point:
        return Miss(MissCode.DTYPE, up, "the other factor is {}", dtype_of(up), progress=3)
    return _halves(found, up) or found.times(up)


def _halves(found: Gated, up: Node) -> Gated | None:
    """View an activation of one half of a tensor, times the other half, as one step."""
    act = found.steps[0] if len(found.steps) == 1 else None
    halves = halves_of(found.x, up)
    if halves is None or not isinstance(act, Act):
        return None
    return Gated(halves.source, (Glu(act, halves.order),))


def _shared(y: Node, found: Gated) -> Miss | None:
    """Refuse values between what the activation reads and ``y`` that others read too."""
    stack, parts = [y], any(isinstance(step, Glu) for step in found.steps)
    while stack:
        node = stack.pop()
        for value in node.all_input_nodes:
            end = value is found.x or value in found.extras or constant_of(value) is not None
            if end or (parts and isinstance(movement_of(value), Slice)):
                continue
            others = sorted({op_name(user) for user in value.users if user is not node})
            if others:
                text = "{} is also read by {}"
                told = op_name(value), ", ".join(others)
                return Miss(MissCode.SHARED, value, text, *told, progress=3)
            stack.append(value)
    return None
