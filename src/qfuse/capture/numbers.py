"""Numbers that a model reads out of its own parameters and buffers: ``float(self.scale)``."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from qfuse.capture.aliasing import written_inputs
from qfuse.ir.aten import aten
from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops.constants import number_of

_READS: Mapping[Any, Callable[[Any], Any]] = {
    torch.Tensor.item: lambda number: number,
    torch.Tensor.__float__: float,
    torch.Tensor.__int__: int,
    torch.Tensor.__bool__: bool,
}
# Subclasses, such as quantized weights, may refuse to be a number.
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_ITEM = (aten.item.default, aten._local_scalar_dense.default)  # noqa: SLF001 - an op's name


class KnownNumbers(TorchFunctionMode):
    """While a model is traced, read its parameters and buffers of one element as numbers.

    torch.export makes a symbol of each, which the graph has no value of, and refuses ``float`` and
    branches.

    Args:
        model: The model that is traced.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model = model
        self._read: set[str] = set()
        self._numbers = {
            name: tensor.item()
            for name, tensor in _tensors(model)
            if type(tensor) in _PLAIN and tensor.numel() == 1 and not tensor.is_meta
        }

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer what reads a number; call everything else."""
        del types
        if func in _READS and args:
            # While the model is traced, other tensors stand for its own, under the same names.
            name = next((name for name, held in _tensors(self._model) if held is args[0]), None)
            if name in self._numbers:
                self._read.add(name)
                return _READS[func](self._numbers[name])
        return func(*args, **(kwargs or {}))

    def changes(self, program: ExportedProgram) -> bool:
        """Whether the traced program writes what was read, so that it is not a constant."""
        signature = program.graph_signature
        written = written_inputs(program)
        names = {spec.target for spec in signature.input_specs if spec.arg.name in written}
        names |= {
            spec.target
            for spec in signature.output_specs
            if spec.kind is OutputKind.BUFFER_MUTATION
        }
        return not names.isdisjoint(self._read)


def _tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    parameters = model.named_parameters(remove_duplicate=False)
    return [*parameters, *model.named_buffers(remove_duplicate=False)]


def known_numbers(nodes: Sequence[Node], constants: Mapping[Node, torch.Tensor]) -> dict[Node, Any]:
    """Return what nodes of a traced graph compute from numbers in constants.

    A program that was exported elsewhere has these as symbols.

    Args:
        nodes: The nodes, in order.
        constants: The constants that are not written.
    """
    known: dict[Node, Any] = {}
    for node in nodes:
        if is_call(node, *_ITEM):
            value = constants.get(node.all_input_nodes[0])
            if value is not None and value.numel() == 1 and not value.is_meta:
                known[node] = value.item()
        elif _is_arithmetic(node) and all(source in known for source in node.all_input_nodes):
            args = [known[arg] if isinstance(arg, Node) else arg for arg in node.args]
            known[node] = node.target(*args)  # type: ignore[operator]
    sizes = _sizes(nodes) if known else set()
    return {
        node: number
        for node, number in known.items()
        if sizes.isdisjoint(_symbols(node.meta["val"]))
    }


def _is_arithmetic(node: Node) -> bool:
    """Whether ``node`` computes a number from numbers."""
    named = getattr(node.target, "__module__", "")
    plain = node.op == "call_function" and named in {
        operator.__name__,
        "_operator",
        builtins.__name__,
    }
    inputs = node.all_input_nodes
    numbers = all(isinstance(arg, Node) or number_of(arg) is not None for arg in node.args)
    return plain and bool(inputs) and numbers and not node.kwargs


def _sizes(nodes: Sequence[Node]) -> set[object]:
    """Return the symbols in the sizes of tensors: a size that is a symbol stays one."""
    found: set[object] = set()
    for node in nodes:
        value = node.meta.get("val")
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, torch.Tensor):
                found.update(*map(_symbols, part.shape))
    return found


def _symbols(value: object) -> set[object]:
    numbers = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return set(value.node.expr.free_symbols) if isinstance(value, numbers) else set()
