"""Put the activation after a fused linear into its epilogue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from qfuse.ir.epilogue import Act
from qfuse.ir.events import Exactness, MissCode
from qfuse.ir.schema import arguments, overload_of
from qfuse.optimize.extend import append_step, open_linear
from qfuse.rewrite.rule import Miss, Rule

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.fx import Node
    from torch.fx.node import Argument

    from qfuse.ir.views import FusedLinear
    from qfuse.rewrite.rewriter import Rewriter

__all__ = ["ActivationSite", "FuseActivation"]

_aten = torch.ops.aten

_PLAIN: dict[OpOverload, str] = {
    _aten.relu.default: "relu",
    _aten.silu.default: "silu",
    _aten.sigmoid.default: "sigmoid",
    _aten.tanh.default: "tanh",
    _aten.hardswish.default: "hardswish",
    _aten.hardsigmoid.default: "hardsigmoid",
}


@dataclass(frozen=True, slots=True)
class ActivationSite:
    """A fused linear and the activation that alone reads it."""

    fused: FusedLinear
    node: Node
    act: Act


class FuseActivation(Rule[ActivationSite]):
    """``act(qfuse.linear(...))`` becomes ``qfuse.linear(..., epilogue="act(...)")``.

    Refuses: a linear that others read; bounds or slopes that are not numbers; a clamp with one
    bound only on the upper side (there is no activation of that name), or with bounds that cross.
    """

    name = "fuse-activation"
    anchors: ClassVar[tuple[OpOverload, ...]] = (
        *_PLAIN,
        _aten.gelu.default,
        _aten.hardtanh.default,
        _aten.relu6.default,
        _aten.clamp.default,
        _aten.clamp_min.default,
        _aten.leaky_relu.default,
    )
    exactness = Exactness.EXACT

    def match(self, node: Node) -> ActivationSite | Miss:
        """Match an activation whose input is an open fused linear."""
        a = arguments(node)
        fused = open_linear(a.get("self", a.get("input")), node)
        if isinstance(fused, Miss):
            return fused
        act = _activation(node, a)
        if act is None:
            text = "{} with these arguments is not an activation of the fused op"
            return Miss(MissCode.ARGUMENT, node, text, node.target, progress=3)
        return ActivationSite(fused, node, act)

    def rewrite(self, site: ActivationSite, rw: Rewriter) -> None:
        """Replace the activation by the grown linear."""
        append_step(site.fused, site.node, site.act, rw)


def _activation(node: Node, a: dict[str, Argument]) -> Act | None:
    op = overload_of(node)
    assert op is not None, "the anchor is an op"
    if op in _PLAIN:
        return Act(_PLAIN[op])
    if op is _aten.gelu.default:
        return {"none": Act("gelu"), "tanh": Act("gelu_tanh")}.get(str(a["approximate"]))
    if op is _aten.leaky_relu.default:
        return _numbered("leaky_relu", a["negative_slope"])
    if op in {_aten.relu6.default, _aten.hardtanh.default}:
        return _bounded(a.get("min_val", 0.0), a.get("max_val", 6.0))
    return _clamp(a["min"], a.get("max"))


def _clamp(low: Argument, high: Argument) -> Act | None:
    """A clamp at zero from below is a relu; one with two bounds is a hardtanh."""
    if high is not None:
        return _bounded(low, high)
    return Act("relu") if isinstance(low, (int, float)) and low == 0 else None


def _bounded(low: Argument, high: Argument) -> Act | None:
    """Bounds the wrong way round give the upper one everywhere, which no activation does."""
    act = _numbered("hardtanh", low, high)
    return act if act is not None and act.args[0] <= act.args[1] else None


def _numbered(name: str, *values: Argument) -> Act | None:
    numbers = [float(v) for v in values if isinstance(v, (int, float))]
    return Act(name, tuple(numbers)) if len(numbers) == len(values) else None
