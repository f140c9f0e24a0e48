"""Values of a graph's nodes on example inputs, computed lazily."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from qfuse.ir.dtypes import FLOATS
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.ops.declare import Op
from qfuse.ir.ops.library import declaration_of
from qfuse.ir.ops.output import Output
from qfuse.rewrite.long_sums import call_with_sum_error, has_sums

_OLD, _NEW = 1, 2


class Values:
    """Evaluates nodes lazily and caches the results.

    Args:
        module: The graph and its constants.
        inputs: One real tensor per placeholder, in order. They are never mutated, since the
            graphs are functional.
    """

    def __init__(self, module: GraphModule, inputs: Sequence[torch.Tensor]) -> None:
        self._module = module
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        self._known: dict[Node, Any] = dict(zip(placeholders, inputs, strict=True))

    def of(self, node: Node) -> Any:
        """Return the value of ``node``, computing its operands first."""
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
        return _call(node, self._known)


def wide_value(
    node: Node,
    values: Values,
    boundary: frozenset[Node],
    *,
    shaken: int | None = None,
    narrow: bool = False,
) -> Any | None:
    """Evaluate ``node`` in float64 from the values of ``boundary``, without intermediate rounding.

    Casts to narrower float dtypes become casts to float64, and the references of qfuse's ops
    compute in float64, so the result is the exact meaning of the region.

    Args:
        node: The result of the region.
        values: The values of the boundary.
        boundary: Where the region begins.
        shaken: A seed; the floats of the boundary are then moved by up to one unit in the last
            place of float32. What a value loses by that is decided by a tie.
        narrow: Whether qfuse's ops round what they quantize to the float dtype that they have in
            the graph, and nothing else.

    Returns:
        The value, or ``None`` if an op of the region does not support float64.
    """
    random = None if shaken is None else torch.Generator().manual_seed(shaken)

    def given(source: Node) -> Any:
        wide = _widen(values.of(source))
        return wide if random is None else _shake(wide, random)

    try:
        return _evaluate(node, boundary, given, _call_narrow if narrow else _call_wide)
    except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError):
        # The op rejects float64; the caller falls back to the narrow value.
        return None


def long_sum_value(node: Node, values: Values, boundary: frozenset[Node]) -> Any | None:
    """Evaluate ``node`` like :func:`wide_value`, with the error of long sequential sums.

    Returns:
        The value, or ``None`` if it has no products, or an op does not support float64.
    """
    if not _any_sums(node, boundary):
        return None
    try:
        return _evaluate(node, boundary, lambda n: _widen(values.of(n)), _call_summed)
    except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError):
        return None


def _any_sums(node: Node, boundary: frozenset[Node]) -> bool:
    stack, seen = [node], {node}
    while stack:
        top = stack.pop()
        if top in boundary:
            continue
        if has_sums(top):
            return True
        fresh = [n for n in top.all_input_nodes if n not in seen]
        seen.update(fresh)
        stack.extend(fresh)
    return False


def region_value(node: Node, values: Values, boundary: frozenset[Node]) -> Any:
    """Evaluate ``node`` from the values of ``boundary`` without caching intermediates."""
    return _evaluate(node, boundary, values.of, _call)


def meeting_points(old: Node, new: Node) -> frozenset[Node]:
    """Return the nearest common ancestors of two nodes, after which their regions differ."""
    sides: dict[Node, int] = {}
    heap: list[_Later] = []

    def reach(node: Node, side: int) -> None:
        if node not in sides:
            heapq.heappush(heap, _Later(node))
        sides[node] = sides.get(node, 0) | side

    reach(old, _OLD)
    reach(new, _NEW)
    found: set[Node] = set()
    # Visit the latest node first, so that all its users have been visited before it.
    while heap:
        node = heapq.heappop(heap).node
        # Both sides have the same value from here on up, so the walk stops.
        if sides[node] == _OLD | _NEW:
            found.add(node)
            continue
        for source in node.all_input_nodes:
            reach(source, sides[node])
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class _Later:
    """Orders nodes from last to first."""

    node: Node

    def __lt__(self, other: _Later) -> bool:
        return other.node < self.node


def _evaluate(
    node: Node,
    boundary: frozenset[Node],
    given: Callable[[Node], Any],
    call: Callable[[Node, dict[Node, Any]], Any],
) -> Any:
    known: dict[Node, Any] = {}
    stack = [node]
    while stack:
        top = stack[-1]
        if top in known:
            stack.pop()
        elif top in boundary or top.op in {"placeholder", "get_attr"}:
            # Inputs and constants end the walk too: a value that only one side uses is above no
            # meeting point, and is computed from them.
            known[top] = given(top)
        elif missing := [n for n in top.all_input_nodes if n not in known]:
            stack.extend(missing)
        else:
            known[top] = call(top, known)
    return known[node]


def _call(node: Node, known: dict[Node, Any]) -> Any:
    assert callable(node.target), f"cannot evaluate {node.format_node()}"
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: known[n])
    with torch.no_grad():
        return node.target(*args, **kwargs)


def _call_wide(node: Node, known: dict[Node, Any]) -> Any:
    assert callable(node.target), f"cannot evaluate {node.format_node()}"
    args, kwargs = _wide_arguments(node, known)
    with torch.no_grad():
        return node.target(*args, **kwargs)


def _call_narrow(node: Node, known: dict[Node, Any]) -> Any:
    declared = declaration_of(overload_of(node))
    dtype = None if declared is None else _rounded_to(declared, node)
    if declared is None or dtype is None:
        return _call_wide(node, known)

    def reference(*args: Any) -> Any:
        y = declared.reference(*args)
        if isinstance(y, torch.Tensor):
            return y.to(dtype).double()
        return y[0].to(dtype).double(), *y[1:]

    args, kwargs = _wide_arguments(node, known)
    with torch.no_grad():
        return declared.compute(reference, *args, **kwargs)


def _rounded_to(declared: type[Op], node: Node) -> torch.dtype | None:
    """Return the dtype of the floats that an op quantizes, or ``None`` if its result is float."""
    view = declared.of(node)
    output = getattr(view, "output", None)
    held = output if isinstance(output, Output) else None if view is None else view.result_params
    spec = None if held is None else held.spec
    return None if spec is None else spec.float_dtype


def _call_summed(node: Node, known: dict[Node, Any]) -> Any:
    if not has_sums(node):
        return _call_wide(node, known)
    with torch.no_grad():
        return call_with_sum_error(node, *_wide_arguments(node, known))


def _wide_arguments(node: Node, known: dict[Node, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: known[n])
    # A `getitem` takes an index, which must not be widened.
    op = overload_of(node)
    if op is not None:
        args, kwargs = _widen(args), {k: _widen(v) for k, v in kwargs.items()}
    # The text of a spec names its dtypes too.
    declared = declaration_of(op)
    if declared is not None:
        args, kwargs = declared.widened_args(args, kwargs), {}
    return args, kwargs


def _shake(value: Any, random: torch.Generator) -> Any:
    """Multiply float64 values by ``1 + u``, with ``u`` uniform within the epsilon of float32."""
    if isinstance(value, (list, tuple)):
        return type(value)(_shake(v, random) for v in value)
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.float64:
        return value
    shake = torch.rand(value.shape, generator=random, dtype=torch.float64) * 2 - 1
    return value * (1 + torch.finfo(torch.float32).eps * shake)


def _widen(value: Any) -> Any:
    """Return the float64 form of a tensor or a dtype."""
    match value:
        case torch.Tensor():
            return value.double() if value.dtype in FLOATS else value
        case torch.dtype():
            return torch.float64 if value in FLOATS else value
        case list() | tuple():
            return type(value)(map(_widen, value))
        case _:
            return value
