"""Results of a graph of Dynamo that share memory: with an input, or with each other.

Code after a graph break may write to such a result, and what it is a view of has to change. The
compiled graph gives new tensors, so it returns what they are views of, and the views are taken of
that, or of the inputs, after each call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from qfuse.capture.provenance import UserFiles, source_line
from qfuse.dynamo._dynamo_api import (
    example_size,
    memory_id,
    size_text,
    sizes_of_inputs,
    symbols_of,
    traced_value,
)
from qfuse.ir.errors import CaptureError, InputError
from qfuse.ir.signature.size_expr import SizeFunction, parse_size
from qfuse.ir.sizes import Size, axis_order

_Sizes: TypeAlias = Mapping[str, tuple[int, int | None]]
_Numbers: TypeAlias = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where the elements of a view are, within the tensor that it is a view of.

    Attributes:
        size: Its shape.
        stride: Elements between its neighbours, per axis.
        offset: Elements between the first ones of the two.
    """

    size: tuple[SizeFunction, ...]
    stride: tuple[SizeFunction, ...]
    offset: SizeFunction

    @classmethod
    def between(cls, view: torch.Tensor, base: torch.Tensor, sizes: _Sizes) -> Geometry | None:
        """Return the geometry of ``view`` within ``base``; ``None`` if a call does not tell it.

        Args:
            view: A traced value.
            base: Another one, with the same memory.
            sizes: The sizes that a call tells.
        """
        bits = (base.is_conj(), base.is_neg()) == (view.is_conj(), view.is_neg())
        offset = view.storage_offset() - base.storage_offset()
        known = _functions((*view.shape, *view.stride(), offset), sizes)
        if not bits or base.dtype != view.dtype or known is None:
            return None
        rank = view.ndim
        return cls(known[:rank], known[rank:-1], known[-1])

    def of(self, base: torch.Tensor, numbers: _Numbers) -> torch.Tensor:
        """Return the view of a tensor, itself if that is all of it."""
        size, stride = _values(self.size, numbers), _values(self.stride, numbers)
        offset = int(self.offset(numbers))
        if not offset and size == base.shape and stride == base.stride():
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
        sizes: Input and axis of each size that varies; no axis if the input is the size itself.
    """

    returned: tuple[Any, ...]
    results: tuple[_Result, ...]
    strides: Mapping[int, tuple[SizeFunction, ...]]
    sizes: _Sizes

    @classmethod
    def of(cls, graph: Graph) -> Results:
        """Find the results of ``graph`` that share memory.

        Raises:
            CaptureError: One of them is a view in another dtype, or its size is unknown before the
                call.
        """
        outputs = graph.output_node().args[0]
        assert isinstance(outputs, (tuple, list)), "Dynamo returns a tuple"
        placeholders = graph.find_nodes(op="placeholder")
        inputs = {node: i for i, node in enumerate(placeholders)}
        owners = _owners(graph)
        memory = [_memory(node) for node in outputs]
        sizes = sizes_of_inputs(placeholders)
        returned: dict[Any, int] = {}
        results = []
        strides: dict[int, tuple[SizeFunction, ...]] = {}
        for node, own in zip(outputs, memory, strict=True):
            origin = _origin(node)
            is_input = origin in inputs
            owner = origin if is_input else owners.get(own, node)
            if own is None or (owner is node and not is_input):
                results.append(_Result(returned.setdefault(node, len(returned))))
                continue
            base, view = traced_value(owner), traced_value(node)
            stride = _functions(base.stride(), sizes)
            made = None if stride is None else Geometry.between(view, base, sizes)
            # What nothing else shares may be a copy, unless code may rely on the strides of a part.
            alone = not is_input and memory.count(own) == 1
            if alone and (made is None or _is_dense(view)):
                results.append(_Result(returned.setdefault(node, len(returned))))
                continue
            if made is None or stride is None:
                raise _unknown_view(node, base, view)
            at = inputs[owner] if is_input else returned.setdefault(owner, len(returned))
            if not is_input:
                strides[at] = stride
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
        numbers = {
            text: inputs[at] if axis is None else inputs[at].shape[axis]
            for text, (at, axis) in self.sizes.items()
        }
        tensors = list(made)
        for position, stride in self.strides.items():
            tensors[position] = _laid_out(tensors[position], _values(stride, numbers))
        results = []
        for result in self.results:
            base = (inputs if result.is_input else tensors)[result.position]
            results.append(base if result.view is None else result.view.of(base, numbers))
        return tuple(results)


def _memory(node: Any) -> int | None:
    value = traced_value(node) if isinstance(node, Node) else None
    return memory_id(value) if isinstance(value, torch.Tensor) else None


def _origin(node: Any) -> Any:
    """Return where the chain of views and writes that leads to a result begins.

    Inputs that share memory in the example need not share it in a call, so the graph tells which
    of them a result is a view of.
    """
    own = _memory(node)
    while own is not None:
        sources = []
        for source in node.all_input_nodes:
            # The results of ops such as `chunk` are items of one node.
            has_items = isinstance(traced_value(source), (tuple, list))
            sources += [source, *source.all_input_nodes] if has_items else [source]
        source = next((source for source in sources if _memory(source) == own), None)
        if source is None:
            break
        node = source
    return node


def _owners(graph: Graph) -> dict[int | None, Node]:
    """Return the first node with each memory."""
    owners: dict[int | None, Node] = {}
    for node in graph.nodes:
        if node.op != "output":
            owners.setdefault(_memory(node), node)
    owners.pop(None, None)
    return owners


def _functions(values: Sequence[Size], sizes: _Sizes) -> tuple[SizeFunction, ...] | None:
    """Return what computes sizes from those that a call tells; ``None`` if one is not told."""
    if not all(symbols_of(size) <= sizes.keys() for size in values):
        return None
    try:
        return tuple(parse_size(size_text(size)) for size in values)
    except InputError:
        # The expression of a size has a function that `parse_size` does not know.
        return None


def _values(functions: Sequence[SizeFunction], numbers: _Numbers) -> tuple[int, ...]:
    return tuple(int(function(numbers)) for function in functions)


def _is_dense(value: torch.Tensor) -> bool:
    """Whether the example's elements leave no gaps; sizes that vary were 2 or more there."""
    shape, strides = [*map(example_size, value.shape)], [*map(example_size, value.stride())]
    return axis_order(shape, strides) is not None


def _unknown_view(node: Node, base: torch.Tensor, view: torch.Tensor) -> CaptureError:
    return CaptureError(
        f"the graph returns {node.name}, which shares memory with an input or another result "
        f"as {view.dtype} of {base.dtype}, or has a size that is none of an input's",
        where=source_line(node.meta.get("stack_trace"), UserFiles()),
        fix="return a copy: .clone()",
    )


def _laid_out(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with the strides that the graph gives it."""
    if tensor.stride() == stride:
        return tensor
    return tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)
