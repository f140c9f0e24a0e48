"""Move, combine and cancel static Q/DQ ops of PT2E.

Only PT2E's ops reach Inductor's slots; torchao's are decomposed to plain arithmetic by then.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule

from qfuse.inductor.numbers import Numbers
from qfuse.inductor.pooling import pooled, sink_below_pools
from qfuse.inductor.products import call
from qfuse.inductor.pt2e import DEQUANTIZE, QUANTIZE, is_quantization
from qfuse.ir.events import EventLog, Fired
from qfuse.ir.graph.alias import leaves_graph
from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.graph.stage_graph import place_of
from qfuse.ir.ops.views import dtype_of, node_of, shape_of, tensor_of
from qfuse.ir.quant.round_trip import round_trip_failure
from qfuse.ir.sizes import same_shape, same_strides
from qfuse.rewrite.prelude import Exactness, Node, Rewriter, arguments, aten
from qfuse.rewrite.rewriter import GraphEditor

_ROOM = "inductor"
# Permutations of elements: each is moved unchanged, none is dropped or added.
_MOVES = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
)
# Bounds the search for the quantize whose values reach this one.
_STEPS = 32


def move_quantization(
    module: GraphModule, values: Mapping[Node, torch.Tensor], log: EventLog
) -> None:
    """Sink dequantize ops below max pools; lift, combine and cancel quantize ops.

    Each rewrite is exact. A dequantize-quantize pair is the identity only if both have the same
    parameters and range, the values are in that range, as those of a quantize are, and they
    survive the round trip by :mod:`qfuse.ir.quant.round_trip`.
    """
    sink_below_pools(module, log)
    moving = _Moving(module, log)
    for node in list(module.graph.nodes):
        if is_quantization(node, QUANTIZE):
            moving.lift(node)
    # After lifting: quantizes of several views are now equal quantizes of one value.
    moving.combine(values)
    for node in list(module.graph.nodes):
        if is_quantization(node, QUANTIZE):
            moving.cancel(node)


class _Moving:
    """Moves the quantize ops of one graph."""

    def __init__(self, module: GraphModule, log: EventLog) -> None:
        self._module = module
        self._log = log
        self._editor = GraphEditor(module)

    def lift(self, node: Node) -> None:
        """Lift a quantize above views without other users."""
        moves: list[Node] = []
        source = _source(node)
        # For another user the float view would stay, and the quantized one be computed besides.
        while is_call(source, *_MOVES) and len(source.users) == 1:
            moves.append(source)
            source = _source(source)
        # The caller would get a view instead of a tensor of its own.
        if not moves or leaves_graph(node):
            return
        rw = self._editor.rewriter("lift-quantize", node)
        place = place_of(node)
        new = first = _of(source, node, rw)
        for move in reversed(moves):
            new = _of(new, move, rw)
        if not same_strides(tensor_of(node), tensor_of(new)):
            rw.undo()
            return
        rw.replace(node, new)
        rw.commit()
        self._fired("lift-quantize", place, first)

    def combine(self, values: Mapping[Node, torch.Tensor]) -> None:
        """Combine equal quantize ops of one value."""
        numbers = Numbers(self._module.graph, values)
        first: dict[int, Node] = {}
        for node in [n for n in self._module.graph.nodes if is_quantization(n, QUANTIZE)]:
            known = first.setdefault(numbers.of(node), node)
            if known is node or (leaves_graph(node) and leaves_graph(known)):
                continue
            rw = self._editor.rewriter("combine", node)
            place = place_of(node)
            rw.replace(node, known)
            rw.commit()
            self._fired("combine", place, known)

    def cancel(self, node: Node) -> None:
        """Cancel a dequantize-quantize pair."""
        real = _source(node)
        if not is_quantization(real, DEQUANTIZE) or _params(real) != _params(node):
            return
        if not _is_exact(node):
            return
        stored = source = _source(real)
        for _ in range(_STEPS):
            before = _before(source)
            if before is None:
                break
            source = before
        # Moves and pools return elements of their source, so its range holds for them too.
        within = is_quantization(source, QUANTIZE) and _params(source) == _params(node)
        whole, named = torch.iinfo(dtype_of(stored)), arguments(node)
        # Otherwise the quantize may clip, as the range of a fused ReLU does.
        if not within and (whole.min, whole.max) != (named["quant_min"], named["quant_max"]):
            return
        # The caller would get the tensor in front of the pair instead of a new one.
        if leaves_graph(node) or not same_shape(shape_of(node), shape_of(stored)):
            return
        # Inductor's graphs have chosen their layouts: users may depend on these strides.
        if not same_strides(tensor_of(node), tensor_of(stored)):
            return
        rw = self._editor.rewriter("cancel-quantize", node)
        place = place_of(node)
        rw.replace(node, stored)
        rw.commit()
        self._fired("cancel-quantize", place, stored)

    def _fired(self, rule: str, place: Any, made: Node) -> None:
        key = f"{_ROOM}/{rule}@{place.node}"
        self._log.add(Fired(_ROOM, rule, key, Exactness.EXACT, (place,), (made.name,)))


def _source(node: Node) -> Node:
    """Return the operand of a quantize, a dequantize or a view."""
    return node_of(next(iter(arguments(node).values())))


def _of(source: Node, node: Node, rw: Rewriter) -> Node:
    """Emit a copy of a call with another operand."""
    op, named = overload_of(node), arguments(node)
    assert op is not None, f"not a call of an op: {node.format_node()}"
    first = next(iter(named))
    return call(op, {**named, first: source}, rw)


def _before(node: Node) -> Node | None:
    """Return the source of a value's elements."""
    return _source(node) if is_call(node, *_MOVES) else pooled(node)


def _params(node: Node) -> Hashable:
    named = arguments(node)
    names = ("scale", "zero_point", "quant_min", "quant_max", "dtype")
    # By text, since 0.0 == -0.0 and 1 == True.
    return tuple((type(named[name]), repr(named[name])) for name in names)


def _is_exact(node: Node) -> bool:
    """Whether multiplying and dividing by the scale returns each quantized value."""
    named = arguments(node)
    storage, scale, zero = named["dtype"], named["scale"], named["zero_point"]
    if not isinstance(storage, torch.dtype):
        return False
    if not isinstance(scale, (int, float)) or not isinstance(zero, int):
        return False
    # Python's floats, which PT2E has as literals here, are float64.
    double = torch.float64
    numbers = torch.tensor(scale, dtype=double), torch.tensor(zero, dtype=double)
    return round_trip_failure(storage, *numbers) is None
