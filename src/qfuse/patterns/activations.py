"""Maps calls of ATen to the activations of an epilogue."""

from __future__ import annotations

import math

from torch.fx.node import Argument

from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.ops.epilogue import Act
from qfuse.ir.ops.views import node_of
from qfuse.rewrite.pattern import Step
from qfuse.rewrite.prelude import Node, OpOverload, arguments, aten

_PLAIN: dict[OpOverload | None, str] = {
    aten.relu.default: "relu",
    aten.silu.default: "silu",
    aten.sigmoid.default: "sigmoid",
    aten.tanh.default: "tanh",
    aten.hardswish.default: "hardswish",
    aten.hardsigmoid.default: "hardsigmoid",
    aten.mish.default: "mish",
}

# The constants of selu in torch, as arguments of elu.
_SELU = (1.6732632423543772848170429916717, 1.0507009873554804934193349852946, 1.0)

ACTIVATION_OPS: tuple[OpOverload, ...] = (
    *(op for op in _PLAIN if op is not None),
    aten.gelu.default,
    aten.hardtanh.default,
    aten.relu6.default,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
    aten.leaky_relu.default,
    aten.elu.default,
    aten.selu.default,
    aten.celu.default,
)
"""The activations that are one call of ATen."""

SQUARE_OPS: tuple[OpOverload, ...] = (
    aten.square.default,
    aten.pow.Tensor_Scalar,
    aten.mul.Tensor,
)
"""The ops that may square their operand."""

_RELU = Act("relu")


def squared(node: Node) -> Node | None:
    """Return the operand that ``node`` squares, if it squares one."""
    a = arguments(node)
    if is_call(node, aten.square.default):
        return node_of(a["self"])
    if is_call(node, aten.pow.Tensor_Scalar):
        exponent = a["exponent"]
        return node_of(a["self"]) if isinstance(exponent, (int, float)) and exponent == 2 else None  # noqa: PLR2004
    same = is_call(node, aten.mul.Tensor) and a["self"] is a["other"]
    return node_of(a["self"]) if same else None


def _squared_relu(node: Node) -> Node | None:
    """Return the operand of a ReLU that ``node`` squares."""
    relu = squared(node) if is_call(node, *SQUARE_OPS) else None
    if relu is None or not is_call(relu, *ACTIVATION_OPS) or activation_of(relu) != _RELU:
        return None
    return activated(relu)


def activated(node: Node) -> Node:
    """Return the operand of an activation."""
    source = _squared_relu(node)
    if source is not None:
        return source
    a = arguments(node)
    return node_of(a["self"] if "self" in a else a["input"])


def _source(node: Node) -> Node | None:
    return activated(node) if is_call(node, *ACTIVATION_OPS) else _squared_relu(node)


ACTIVATION = Step("activation", _source, (*ACTIVATION_OPS, *SQUARE_OPS))
"""A call that :func:`activation_of` may support, or the square of a ReLU."""


def activation_of(node: Node) -> Act | None:
    """Return the activation that a call computes; ``None`` if the fused ops do not have it.

    They do not have clamps whose bounds cross, and bounds or slopes that are not numbers.
    """
    a = arguments(node)
    op = overload_of(node)
    plain = "squared_relu" if _squared_relu(node) is not None else _PLAIN.get(op)
    if plain is not None:
        return Act(plain)
    if op is aten.gelu.default:
        return {"none": Act("gelu"), "tanh": Act("gelu_tanh")}.get(str(a["approximate"]))
    if op is aten.leaky_relu.default:
        return _numbered("leaky_relu", a["negative_slope"])
    if op in {aten.elu.default, aten.selu.default, aten.celu.default}:
        return _exponential(op, a)
    if op in {aten.relu6.default, aten.hardtanh.default}:
        return _bounded(a.get("min_val", 0.0), a.get("max_val", 6.0))
    return _clamp(a.get("min"), a.get("max"))


def _exponential(op: OpOverload | None, a: dict[str, Argument]) -> Act | None:
    """Map ELU and the ops that torch computes by it."""
    if op is aten.elu.default:
        return _numbered("elu", a["alpha"], a["scale"], a["input_scale"])
    if op is aten.selu.default:
        return Act("elu", _SELU)
    alpha = a["alpha"]
    known = isinstance(alpha, (int, float)) and alpha != 0
    return _numbered("elu", alpha, 1.0, 1.0 / alpha) if known else None  # type: ignore[operator]


def _clamp(low: Argument, high: Argument) -> Act | None:
    """Map a lower bound of zero to relu, others to hardtanh; a missing bound is infinite."""
    if high is None and isinstance(low, (int, float)) and low == 0:
        return Act("relu")
    return _bounded(-math.inf if low is None else low, math.inf if high is None else high)


def _bounded(low: Argument, high: Argument) -> Act | None:
    """Refuse crossed bounds, with which a clamp is constant; no activation computes that."""
    act = _numbered("hardtanh", low, high)
    # The comparison is false for NaN bounds too.
    return act if act is not None and act.args[0] <= act.args[1] else None


def _numbered(name: str, *values: Argument) -> Act | None:
    numbers = [float(v) for v in values if isinstance(v, (int, float))]
    return Act(name, tuple(numbers)) if len(numbers) == len(values) else None
