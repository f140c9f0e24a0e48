"""Quantization with given parameters moves, is combined and cancels, in the spelling of PT2E.

Only its ops are there when Inductor's slots are reached; what torchao computes is plain arithmetic
by then.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from qfuse.inductor.numbers import Numbers
from qfuse.inductor.pooling import pooled, sink_below_pools
from qfuse.inductor.pt2e import DEQUANTIZE, QUANTIZE, is_quantization
from qfuse.ir.alias import leaves_graph
from qfuse.ir.events import Exactness, Fired
from qfuse.ir.program import place_of
from qfuse.ir.schema import arguments, is_call, overload_of
from qfuse.ir.sizes import same_shape
from qfuse.ir.views import dtype_of, shape_of
from qfuse.rewrite.rewriter import GraphEditor

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping
    from typing import Any

    from torch.fx import GraphModule

    from qfuse.ir.events import EventLog

__all__ = ["move_quantization"]

_aten = torch.ops.aten
_ROOM = "inductor"
# Each element goes somewhere, as it is; nothing is left out and nothing comes in.
_MOVES = (
    _aten.view.default,
    _aten.reshape.default,
    _aten._unsafe_view.default,
    _aten.permute.default,
    _aten.transpose.int,
    _aten.t.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.unsqueeze.default,
)
_STEPS = 32


def move_quantization(
    module: GraphModule, values: Mapping[Node, torch.Tensor], log: EventLog
) -> None:
    """Sink dequantizes below max pools, lift quantizes, combine equal ones, and cancel them.

    Each is exact. A quantize of a dequantize is what was dequantized only if it has the same
    parameters in the same range, and the numbers are in that range, as those of a quantize are.
    """
    sink_below_pools(module, log)
    moving = _Moving(module, log)
    for node in list(module.graph.nodes):
        if is_quantization(node, QUANTIZE):
            moving.lift(node)
    moving.combine(values)
    for node in list(module.graph.nodes):
        if is_quantization(node, QUANTIZE):
            moving.cancel(node)


class _Moving:
    """Moves quantizes of one graph."""

    def __init__(self, module: GraphModule, log: EventLog) -> None:
        self._module = module
        self._log = log
        self._editor = GraphEditor(module)

    def lift(self, node: Node) -> None:
        """Quantize in front of the views, as far as nobody else reads them."""
        moves: list[Node] = []
        source = node.args[0]
        while isinstance(source, Node) and is_call(source, *_MOVES) and len(source.users) == 1:
            moves.append(source)
            source = source.args[0]
        if not moves or not isinstance(source, Node) or leaves_graph(moves[0]):
            return
        rw = self._editor.rewriter("lift-quantize", node)
        place, op = place_of(node), overload_of(node)
        assert op is not None, "it is a call of a quantize"
        new = first = rw.call(op, source, *node.args[1:])
        for move in reversed(moves):
            again = overload_of(move)
            assert again is not None, "it is a call of a view"
            new = rw.call(again, new, *move.args[1:])
        rw.replace(node, new)
        rw.commit()
        self._fired("lift-quantize", place, first)

    def combine(self, values: Mapping[Node, torch.Tensor]) -> None:
        """Quantize once what is quantized alike."""
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
        """Take what was dequantized."""
        real = node.args[0]
        if not isinstance(real, Node) or not is_quantization(real, DEQUANTIZE):
            return
        stored, params = real.args[0], _params(node)
        if not isinstance(stored, Node) or _params(real) != params or not _is_exact(node):
            return
        source: Node | None = stored
        for _ in range(_STEPS):
            before = None if source is None else _before(source)
            if before is None:
                break
            source = before
        within = (
            source is not None and is_quantization(source, QUANTIZE) and _params(source) == params
        )
        whole = torch.iinfo(dtype_of(stored))
        if not within and (whole.min, whole.max) != tuple(node.args[3:5]):
            return
        if leaves_graph(node) or not same_shape(shape_of(node), shape_of(stored)):
            return
        rw = self._editor.rewriter("cancel-quantize", node)
        place = place_of(node)
        rw.replace(node, stored)
        rw.commit()
        self._fired("cancel-quantize", place, stored)

    def _fired(self, rule: str, place: Any, made: Node) -> None:
        key = f"{_ROOM}/{rule}@{place.node}"
        self._log.add(Fired(_ROOM, rule, key, Exactness.EXACT, (place,), (made.name,)))


def _before(node: Node) -> Node | None:
    """Return what the elements of a value are all elements of."""
    if not is_call(node, *_MOVES):
        return pooled(node)
    source = node.args[0]
    return source if isinstance(source, Node) else None


def _params(node: Node) -> Hashable:
    named = arguments(node)
    names = ("scale", "zero_point", "quant_min", "quant_max", "dtype")
    return tuple((type(named[name]), repr(named[name])) for name in names)


def _is_exact(node: Node) -> bool:
    """Whether dividing what was multiplied gives the number again, for each that there is."""
    named = arguments(node)
    scale, dtype = named["scale"], named["dtype"]
    small = isinstance(dtype, torch.dtype) and dtype.itemsize <= 2  # noqa: PLR2004 - bytes
    if not small or not isinstance(scale, (int, float)) or not scale > 0:
        return False
    single = torch.tensor(scale, dtype=torch.float32)
    return math.isfinite(float(single)) and math.isfinite(float(single.reciprocal()))
