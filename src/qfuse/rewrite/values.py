"""Real values of a graph's nodes on given inputs, computed when they are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx.node import map_arg

from qfuse.ir.choose_spec import ChooseSpec
from qfuse.ir.errors import NormalizeError
from qfuse.ir.quant_spec import Arithmetic, QuantSpec
from qfuse.ir.schema import overload_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.fx import GraphModule, Node

__all__ = ["Values", "wide_value"]

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


class Values:
    """Evaluates nodes lazily and remembers what it computed.

    Args:
        module: The graph and its constants.
        inputs: One real tensor per placeholder, in order. They are never written to: the graphs
            are functional.
    """

    def __init__(self, module: GraphModule, inputs: Sequence[torch.Tensor]) -> None:
        self._module = module
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        self._known: dict[Node, Any] = dict(zip(placeholders, inputs, strict=True))

    def of(self, node: Node) -> Any:
        """Return the value of ``node``, computing what it depends on first."""
        stack = [node]
        while stack:
            top = stack[-1]
            if top in self._known:
                stack.pop()
                continue
            missing = [n for n in top.all_input_nodes if n not in self._known]
            if missing:
                stack.extend(missing)
                continue
            self._known[top] = self._compute(top)
            stack.pop()
        return self._known[node]

    def forget(self, nodes: Iterable[Node]) -> None:
        """Drop the values of erased nodes."""
        for node in nodes:
            self._known.pop(node, None)

    def _compute(self, node: Node) -> Any:
        if node.op == "get_attr":
            return self._module.get_buffer(str(node.target))
        assert callable(node.target), f"cannot evaluate {node.format_node()}"
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: self._known[n])
        with torch.no_grad():
            return node.target(*args, **kwargs)


def wide_value(node: Node, values: Values, boundary: frozenset[Node]) -> Any | None:
    """Evaluate ``node`` in float64 from the values of ``boundary``, without roundings between.

    Casts to narrower float types become casts to float64, and the specs of qfuse's ops compute in
    float64: what is left is the meaning of the region.

    Returns:
        The value, or ``None`` if an op of the region has no float64 form.
    """
    known: dict[Node, Any] = {}
    stack = [node]
    try:
        while stack:
            top = stack[-1]
            if top in known:
                stack.pop()
            elif top is not node and (top in boundary or top.op in {"placeholder", "get_attr"}):
                known[top] = _widen(values.of(top))
            elif missing := [n for n in top.all_input_nodes if n not in known]:
                stack.extend(missing)
            else:
                known[top] = _call_wide(top, known)
    except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError):
        # The op checks for its own dtypes; the caller falls back to the narrow value.
        return None
    return known[node]


def _call_wide(node: Node, known: dict[Node, Any]) -> Any:
    assert callable(node.target), f"cannot evaluate {node.format_node()}"
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: known[n])
    if overload_of(node) is not None:
        args = tuple(_widen(a) for a in args)
        kwargs = {k: _widen(v) for k, v in kwargs.items()}
    with torch.no_grad():
        return node.target(*args, **kwargs)


def _widen(value: Any) -> Any:
    """Return the float64 form of a tensor, dtype or spec; anything else as it is."""
    match value:
        case torch.Tensor():
            return value.double() if value.dtype in _NARROW else value
        case torch.dtype():
            return torch.float64 if value in _NARROW else value
        case str():
            return _widen_spec(value)
        case list() | tuple():
            return type(value)(_widen(v) for v in value)
        case _:
            return value


def _widen_spec(text: str) -> str:
    try:
        spec = QuantSpec.parse(text)
    except NormalizeError:
        return _widen_choose(text)
    math = spec.arithmetic
    wide = Arithmetic(torch.float64, math.reciprocal, math.zero_point_first)
    return str(
        QuantSpec(
            spec.dtype,
            spec.quant_min,
            spec.quant_max,
            spec.block,
            torch.float64,
            wide,
            spec.domain,
        )
    )


def _widen_choose(text: str) -> str:
    try:
        spec = ChooseSpec.parse(text)
    except NormalizeError:
        return text.replace("cast(float32)", "cast(float64)").replace(
            "cast(bfloat16)", "cast(float64)"
        )
    return str(
        ChooseSpec(
            spec.formula,
            spec.dtype,
            spec.quant_min,
            spec.quant_max,
            spec.block,
            spec.eps,
            torch.float64,
            spec.zero_point_dtype,
        )
    )
