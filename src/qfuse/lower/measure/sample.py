"""Functions that run one alternative for a product, on random operands of its sizes."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from qfuse.cost import hint_of
from qfuse.ir.aten import aten
from qfuse.ir.graph.schema import is_call, overload_of
from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.epilogue import Epilogue
from qfuse.lower.measure.timer import Run
from qfuse.lower.problems.product import ProductProblem
from qfuse.lower.select.context import LoweringContext
from qfuse.lower.select.select import Offer
from qfuse.targets.huge_pages import HugePages

_EVICTED_BYTES = 64 << 20
"""Bytes that are read from one use of a constant to the next: other layers run meanwhile."""

# Smaller constants stay in a cache, as they may in a model.
_MOST_COPIES = 128

# Loops do these while they load or store.
_MOVED = (aten._to_copy.default, aten.reshape.default)

_Calls = Sequence[tuple[Node, Any, Any, dict[str, Any]]]


# At most this part of a time is taken for what Python adds.
_MOST_OVERHEAD = 0.75


@dataclass(frozen=True, slots=True)
class Sample:
    """One alternative for a product.

    Attributes:
        run: Computes it.
        own_calls: Calls of qfuse's kernels, which a compiled graph calls without Python.
    """

    run: Run
    own_calls: int = 0

    def compiled_seconds(self, seconds: float, python_call: float) -> float:
        """Return the time in a compiled graph, from that of the call in Python."""
        return seconds - min(self.own_calls * python_call, _MOST_OVERHEAD * seconds)


def kernel_sample(problem: ProductProblem, offer: Offer, context: LoweringContext) -> Sample:
    """Return what runs a kernel as it would be called in the graph.

    Its calls are added to the graph to see them, and removed again. Every call of the function
    takes its constants from another place in memory.
    """
    editor = context.session.editor
    with editor.trial():
        rw = editor.rewriter("measure", problem.anchor)
        offer.kernel.emit(problem, offer.claim, rw)
        made = [node for node in rw.journal.made if node.op == "call_function"]
        steps = [node for node in made if not _is_operand(node)]
        # The loops behind a kernel are predicted: a compiler makes one of them.
        while len(steps) > 1 and _is_loop(steps[-1]):
            steps.pop()
        sources = dict.fromkeys(source for step in steps for source in step.all_input_nodes)
        known = {node: _operand(node) for node in sources if node not in steps}
        calls = [(node, node.target, node.args, dict(node.kwargs)) for node in steps]
        rw.undo()
    constants = {node: value for node, value in known.items() if node.op == "get_attr"}
    others = {node: value for node, value in known.items() if node not in constants}
    placed = _copies(list(constants.values()))
    given = (others | dict(zip(constants, copy, strict=True)) for copy in placed)
    own = sum(op is not None and op.namespace == "qfuse" for op in map(overload_of, steps))
    return Sample(_in_turn([_bound(calls, values) for values in given]), own)


def float_sample(problem: ProductProblem) -> Sample:
    """Return what computes the product alone in float, as ATen does.

    Every call takes the weight from another place in memory.
    """
    fused: Any = problem.fused
    changed: dict[str, Any] = {one.name: None for one in fused.layout.params}
    bare = replace(fused, **changed, epilogue=Epilogue(()), extras=())
    names = [one.name for one in bare.layout.fields if not one.of]
    values = {name: getattr(bare, name) for name in names}
    made = {
        name: _random(value.meta["val"], problem.float_dtype)
        for name, value in values.items()
        if isinstance(value, Node)
    }
    constants = [name for name in made if name != "x" and constant_of(values[name]) is not None]
    placed = _copies([made[name] for name in constants])
    given = (values | made | dict(zip(constants, copy, strict=True)) for copy in placed)
    return Sample(_in_turn([partial(type(bare).reference, *one.values()) for one in given]))


def _copies(constants: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return copies of the constants of a call, more than a cache holds; one of large ones."""
    size = sum(tensor.nbytes for tensor in constants)
    if not size:
        return [list(constants)]
    pages, count = HugePages(), min(-(-_EVICTED_BYTES // size), _MOST_COPIES)
    return [[pages.copy(tensor) for tensor in constants] for _ in range(count)]


def _in_turn(runs: Sequence[Callable[[], object]]) -> Run:
    following = itertools.cycle(runs)

    def run() -> object:
        return next(following)()

    return run


def _bound(calls: _Calls, values: Mapping[Node, Any]) -> Callable[[], object]:
    """Return a function that runs the calls on these operands."""
    if len(calls) > 1:
        return partial(_run_calls, calls, values)
    ((_, target, args, kwargs),) = calls
    filled, named = map_arg((args, kwargs), values.__getitem__)
    return partial(target, *filled, **named)


def _is_operand(node: Node) -> bool:
    """Whether the result is given: compiled loops quantize and dequantize in front of a kernel."""
    return is_call(node, *ops.CANONICAL)


def _is_loop(node: Node) -> bool:
    """Whether a call becomes a part of a compiled loop."""
    op = overload_of(node)
    return op is not None and (torch.Tag.pointwise in op.tags or op in _MOVED)


def _operand(node: Node) -> Any:
    known = constant_of(node)
    if known is not None and not known.is_meta:
        return known
    value = node.meta["val"]
    return _random(value) if isinstance(value, torch.Tensor) else hint_of(value)


def _random(value: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a tensor of the traced sizes and strides; its values do not change times."""
    shape, strides = ([hint_of(s) for s in sizes] for sizes in (value.shape, value.stride()))
    kind = dtype or value.dtype
    made = torch.empty_strided(shape, strides, dtype=kind, device="cpu")
    if kind.is_floating_point:
        # Neither zeros nor subnormal numbers, which some processors take longer for.
        return made.copy_(torch.rand(shape, device="cpu").add_(0.5))
    return made.copy_(torch.randint(0, 100, shape, device="cpu"))


def _run_calls(calls: _Calls, given: Mapping[Node, Any]) -> Any:
    values = dict(given)
    result: Any = None
    for node, target, args, kwargs in calls:
        filled, named = map_arg((args, kwargs), values.__getitem__)
        # Results of a call that has several.
        result = (
            operator.getitem(*filled) if target is operator.getitem else target(*filled, **named)
        )
        values[node] = result
    return result
