"""One common ``FakeTensorMode`` for the values of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from qfuse.ir.errors import GraphError
from qfuse.ir.graph.schema import overload_of
from qfuse.passes._torch_api import is_fake, is_symbolic, mode_of, new_mode
from qfuse.passes.examples import Examples, check_example, in_order, known_kind
from qfuse.passes.refuse import refused

_GIVE = "pass example inputs as the pass's second argument, or trace the graph with fake values"
_OTHERS = "pass example inputs of the shapes and dtypes that the graph was traced with"


@dataclass(frozen=True, slots=True)
class Fakes:
    """The mode of all fake values of the copy.

    The copy is on the CPU, since on the meta device constants that the graph spells as numbers
    would lose their values. Values of graphs on the meta device are moved back at the end.

    Attributes:
        mode: The ``FakeTensorMode``.
        on_meta: Whether the caller's graph is on the meta device.
    """

    mode: Any
    on_meta: bool

    @classmethod
    def of(cls, graph: Graph) -> Fakes:
        """Reuse the mode of the caller's values if they share one.

        Raises:
            GraphError: They have several modes, and symbolic sizes, which belong to one mode.
        """
        values = [t for node in graph.nodes for t in _tensors(node.meta.get("val"))]
        modes = {id(mode): mode for mode in map(mode_of, values) if mode is not None}
        roots = graph.find_nodes(op="placeholder")
        inputs = [t for node in roots for t in _tensors(node.meta.get("val"))]
        # A graph without inputs is judged by its other values.
        on_meta = any(t.is_meta for t in inputs or values)
        if len(modes) == 1:
            return cls(next(iter(modes.values())), on_meta)
        if any(is_symbolic(t) for t in values):
            raise GraphError(
                "the fake values of the graph have several modes, and some symbolic sizes",
                fix="trace the graph in one FakeTensorMode",
            )
        return cls(new_mode(), on_meta)

    def value(self, value: Any) -> Any:
        """Convert a value of the caller's graph to one of the copy."""
        return _each(value, self._inside)

    def outside(self, value: Any) -> Any:
        """Convert a value of the copy to one of the caller's graph."""
        if not self.on_meta:
            return value
        return _each(value, lambda t: self.empty(t, torch.device("meta")))

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the value of a constant."""
        if is_valueless(tensor):
            # It has no bytes to convert, only a type.
            return self.empty(tensor, _off_meta(tensor.device))
        fake: torch.Tensor = self.mode.from_tensor(tensor, static_shapes=True)
        return fake

    def empty(self, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a fake tensor with the shape, strides and dtype of another."""
        with self.mode:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)

    def _inside(self, tensor: torch.Tensor) -> torch.Tensor:
        same = mode_of(tensor) is self.mode and not tensor.is_meta
        if same or tensor.layout is not torch.strided:
            return tensor
        return self.empty(tensor, _off_meta(tensor.device))


def is_valueless(tensor: torch.Tensor) -> bool:
    """Whether a constant has no values: it is fake, or on the meta device."""
    return tensor.is_meta or is_fake(tensor)


def without_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain meta tensor as a placeholder for a constant without values."""
    shape, strides = tensor.shape, tensor.stride()
    return torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")


def fill(module: GraphModule, fakes: Fakes, examples: Examples | None) -> None:
    """Set ``meta["val"]`` of every node of ``module``, from example inputs and existing values.

    Raises:
        GraphError: An input has no value, an example does not fit, or an op rejects its arguments.
    """
    inputs = module.graph.find_nodes(op="placeholder")
    given = None if examples is None else in_order(examples, inputs)
    for index, node in enumerate(inputs):
        if "val" in node.meta:
            if given is not None:
                check_example(node, given[index])
            continue
        if not node.users:
            node.meta["val"] = None  # As tracers leave nodes that they treat as constants.
            continue
        if given is None:
            raise refused(node, 'the input has no meta["val"]', _GIVE)
        node.meta["val"] = _example(known_kind(node, given[index]), fakes)
    for node in module.graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            node.meta["val"] = _computed(node, fakes, _GIVE if given is None else _OTHERS)


def _example(value: Any, fakes: Fakes) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return fakes.value(value) if is_valueless(value) else fakes.constant(value)


def _computed(node: Node, fakes: Fakes, fix: str) -> Any:
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: fakes.outside(n.meta["val"]))
    op = overload_of(node)
    # Such as an assertion.
    if op is not None and not op._schema.returns:  # noqa: SLF001 - the way to ask
        return None
    assert callable(node.target), "it was found to be a call of an op"
    try:
        with fakes.mode, torch.no_grad():
            return fakes.value(node.target(*args, **kwargs))
    except (RuntimeError, TypeError, ValueError, LookupError, AssertionError) as error:
        what = f'it has no meta["val"], and cannot be called with fake tensors: {error}'
        raise refused(node, what, fix) from error


def _off_meta(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" else device


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _each(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_each(item, change) for item in value)
    return value
