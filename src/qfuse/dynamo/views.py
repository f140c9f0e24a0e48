"""Results of a graph of Dynamo that share memory: with an input, or with each other.

Code after a graph break may write to such a result, and what it is a view of has to change. The
compiled graph gives new tensors, so it returns what they are views of, and the views are taken of
that, or of the inputs, after each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from qfuse.capture.provenance import UserFiles, source_line
from qfuse.dynamo._dynamo_api import expression_of, memory_id, symbol_of, traced_value
from qfuse.ir.errors import CaptureError

_Size: TypeAlias = int | torch.SymInt


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where the elements of a view are, within the tensor that it is a view of.

    Attributes:
        size: Its shape.
        stride: Elements between its neighbours, per axis.
        offset: Elements between the first ones of the two.
    """

    size: tuple[_Size, ...]
    stride: tuple[_Size, ...]
    offset: _Size

    @classmethod
    def between(cls, view: torch.Tensor, base: torch.Tensor) -> Geometry:
        """Return the geometry of ``view`` within ``base``."""
        offset = view.storage_offset() - base.storage_offset()
        return cls(tuple(view.shape), view.stride(), offset)

    def of(self, base: torch.Tensor, number: Callable[[_Size], int]) -> torch.Tensor:
        """Return the view of a tensor, itself if that is all of it.

        Args:
            base: The tensor.
            number: Returns the value of a size in this call.
        """
        size, stride = [*map(number, self.size)], [*map(number, self.stride)]
        offset = number(self.offset)
        if not offset and tuple(size) == base.shape and tuple(stride) == base.stride():
            return base
        return base.as_strided(size, stride, base.storage_offset() + offset)


@dataclass(frozen=True, slots=True)
class _Result:
    """A result of the graph.

    Attributes:
        position: Index among the inputs of the graph, or among what the compiled graph returns.
        is_input: Which of them.
        view: Its elements; ``None`` if it shares memory with nothing.
    """

    position: int
    is_input: bool = False
    view: Geometry | None = None


@dataclass(frozen=True, slots=True)
class Results:
    """What a graph returns, and what its compiled form has to return instead.

    Attributes:
        returned: The nodes that the compiled form returns.
        results: The results of the graph.
        strides: Of what the compiled form returns and results are views of, by position.
        sizes: Input and axis of each symbol of a size; no axis if the input is the size itself.
    """

    returned: tuple[Any, ...]
    results: tuple[_Result, ...]
    strides: Mapping[int, tuple[_Size, ...]]
    sizes: Mapping[object, tuple[int, int | None]]

    @classmethod
    def of(cls, graph: Graph) -> Results:
        """Find the results of ``graph`` that share memory.

        Raises:
            CaptureError: One of them is a view in another dtype, or its size is unknown before the
                call.
        """
        owners = _owners(graph)
        outputs = graph.output_node().args[0]
        assert isinstance(outputs, (tuple, list)), "Dynamo returns a tuple"
        memory = [_memory(node) for node in outputs]
        returned: dict[Any, int] = {}
        results = []
        strides: dict[int, tuple[_Size, ...]] = {}
        sizes = _sizes(graph)
        inputs = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
        for node, own in zip(outputs, memory, strict=True):
            owner = owners.get(own, node)
            is_input = owner in inputs
            if own is None or (owner is node and not is_input):
                results.append(_Result(returned.setdefault(node, len(returned))))
                continue
            base, view = traced_value(owner), traced_value(node)
            made = Geometry.between(view, base)
            # A view of what nothing else returns may be a copy, but code may rely on its strides.
            known = _is_known(base, view, made, sizes)
            alone = not is_input and memory.count(own) == 1
            if alone and (not known or _elements(view) == _elements(base)):
                results.append(_Result(returned.setdefault(node, len(returned))))
                continue
            if not known:
                raise _unknown_view(node, base, view)
            at = inputs[owner] if is_input else returned.setdefault(owner, len(returned))
            if not is_input:
                strides[at] = base.stride()
            results.append(_Result(at, is_input, made))
        return cls(tuple(returned), tuple(results), strides, sizes)

    @property
    def is_plain(self) -> bool:
        """Whether the compiled form returns the results as they are."""
        return all(
            result.view is None and result.position == i for i, result in enumerate(self.results)
        )

    def after(self, made: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the results of a call.

        Args:
            made: What the compiled form returned.
            inputs: The inputs of the graph.
        """

        def number(size: _Size) -> int:
            if isinstance(size, int):
                return size
            expression = expression_of(size)
            known = {
                symbol: inputs[at] if axis is None else inputs[at].shape[axis]
                for symbol, (at, axis) in self.sizes.items()
                if symbol in expression.free_symbols
            }
            return int(expression.xreplace(known))

        tensors = list(made)
        for position, stride in self.strides.items():
            tensors[position] = _laid_out(tensors[position], tuple(map(number, stride)))
        results = []
        for result in self.results:
            base = (inputs if result.is_input else tensors)[result.position]
            results.append(base if result.view is None else result.view.of(base, number))
        return tuple(results)


def _memory(node: Any) -> int | None:
    value = traced_value(node) if isinstance(node, Node) else None
    return memory_id(value) if isinstance(value, torch.Tensor) else None


def _owners(graph: Graph) -> dict[int | None, Node]:
    """Return the first node with each memory: an input, or an op that made it."""
    owners: dict[int | None, Node] = {}
    for node in graph.nodes:
        if node.op != "output":
            owners.setdefault(_memory(node), node)
    owners.pop(None, None)
    return owners


def _sizes(graph: Graph) -> dict[object, tuple[int, int | None]]:
    found: dict[object, tuple[int, int | None]] = {}
    for position, node in enumerate(graph.find_nodes(op="placeholder")):
        value = traced_value(node)
        axes = enumerate(value.shape) if isinstance(value, torch.Tensor) else [(None, value)]
        for axis, size in axes:
            symbol = symbol_of(size)
            if symbol is not None:
                found.setdefault(symbol, (position, axis))
    return found


def _is_known(
    base: torch.Tensor,
    view: torch.Tensor,
    geometry: Geometry,
    sizes: Mapping[object, tuple[int, int | None]],
) -> bool:
    """Whether a view can be taken of its base after a call."""
    numbers = (*geometry.size, *geometry.stride, geometry.offset, *base.stride())
    symbols = {
        s for n in numbers if isinstance(n, torch.SymInt) for s in expression_of(n).free_symbols
    }
    of_one_kind = (
        base.dtype == view.dtype
        and base.is_conj() == view.is_conj()
        and base.is_neg() == view.is_neg()
    )
    return of_one_kind and symbols <= sizes.keys()


def _unknown_view(node: Node, base: torch.Tensor, view: torch.Tensor) -> CaptureError:
    return CaptureError(
        f"the graph returns {node.name}, which shares memory with an input or another result "
        f"as {view.dtype} of {base.dtype}, or has a size that is none of an input's",
        where=source_line(node.meta.get("stack_trace"), UserFiles()),
        fix="return a copy: .clone()",
    )


def _elements(tensor: torch.Tensor) -> object:
    count: _Size = tensor.numel()
    return count if isinstance(count, int) else expression_of(count)


def _laid_out(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with the strides that the graph gives it."""
    if tensor.stride() == stride:
        return tensor
    return tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)
