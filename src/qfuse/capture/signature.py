"""Convert torch.export's graph signature to qfuse's: inputs, outputs and mutations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    OutputKind,
    SymIntArgument,
    TensorArgument,
)

from qfuse.capture._export_api import guards_of, read_size
from qfuse.capture.aliasing import ReturnedBuffer
from qfuse.capture.example import Leaf, Parameters, is_dynamic
from qfuse.capture.sizes import SizeTable
from qfuse.ir.errors import CaptureError
from qfuse.ir.events import EventLog, Noted
from qfuse.ir.graph.stage_graph import InputSpec, Mutation, OutputSpec, Signature
from qfuse.ir.sizes import axis_order
from qfuse.ir.words import a_kind

_WRITES = (
    OutputKind.BUFFER_MUTATION,
    OutputKind.PARAMETER_MUTATION,
    OutputKind.USER_INPUT_MUTATION,
)


@dataclass(slots=True)
class Interface:
    """The signature, and the nodes of the program that are graph outputs.

    Attributes:
        signature: How the graph is called.
        outputs: Names of the returned nodes, mutated values first.
        copied: Positions of those that are returned as copies, with the metadata of the copies.
        written: Names of the placeholders of mutated constants.
    """

    signature: Signature
    outputs: tuple[str, ...]
    copied: dict[int, dict[str, Any]]
    written: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Returned:
    """A node that the graph returns.

    Attributes:
        name: Its name.
        buffer: The buffer of which a copy is returned in its place.
    """

    name: str
    buffer: ReturnedBuffer | None


@dataclass(slots=True)
class _Reader:
    """Builds the signature of one program."""

    program: ExportedProgram
    constants: dict[str, str]
    returned: dict[int, str]
    buffers: Mapping[int, ReturnedBuffer]
    values: dict[str, Any] = field(init=False)
    sizes: SizeTable = field(init=False)

    def __post_init__(self) -> None:
        self.values = {node.name: node.meta.get("val") for node in self.program.graph.nodes}
        self.sizes = SizeTable(self.program)

    def inputs(self, leaves: list[Leaf]) -> tuple[InputSpec, ...]:
        """Return the specs of the flat inputs, in the order of the leaves."""
        specs = self.program.graph_signature.input_specs
        user = [spec.arg for spec in specs if spec.kind is InputKind.USER_INPUT]
        # torch lists an input for every leaf, also for numbers and strings.
        assert len(user) == len(leaves), f"{len(user)} inputs, {len(leaves)} leaves"
        return tuple(self._input(arg, leaf) for arg, leaf in zip(user, leaves, strict=True))

    def _input(self, arg: object, leaf: Leaf) -> InputSpec:
        match arg:
            case TensorArgument(name=name):
                value = self.values[name]
                shape = self.sizes.add(leaf, name, value)
                order = self._order(leaf, value)
                return InputSpec(leaf.name, name, value.dtype, shape, value.device, order=order)
            case ConstantArgument(value=constant):
                return InputSpec(leaf.name, None, constant=constant)
            case _:
                raise CaptureError(
                    f"{leaf.name} is a {type(arg).__name__.removesuffix('Argument')}: only sizes "
                    "of tensors may vary",
                    fix="leave it out of dynamic_shapes to make it a constant, or pass a tensor",
                )

    def _order(self, leaf: Leaf, value: torch.Tensor) -> tuple[int, ...] | None:
        """Return the order of the axes of the traced layout, ``None`` for a contiguous tensor."""
        order = self._axis_order(value)
        if order is None:
            raise CaptureError(
                f"{leaf.name} was exported with strides {tuple(value.stride())} for the shape "
                f"{tuple(value.shape)}, which leave gaps",
                fix=f"export with {leaf.name}.contiguous()",
            )
        return None if order == tuple(range(len(order))) else order

    def writes(self, inputs: tuple[InputSpec, ...]) -> list[tuple[str, str | None, Mutation]]:
        """Return each mutation: the node of the value, the placeholder of a constant, the spec."""
        signature = self.program.graph_signature
        placeholders = {s.target: s.arg.name for s in signature.input_specs if s.target is not None}
        indices = {spec.placeholder: i for i, spec in enumerate(inputs)}
        found: list[tuple[str, str | None, Mutation]] = []
        for spec in signature.output_specs:
            if spec.kind not in _WRITES:
                continue
            if spec.kind is OutputKind.USER_INPUT_MUTATION:
                mutation = Mutation(len(found), input_index=indices[spec.target])
                found.append((spec.arg.name, None, mutation))
            else:
                name = placeholders[spec.target]
                mutation = Mutation(len(found), buffer=self.constants[name])
                found.append((spec.arg.name, name, mutation))
        return found

    def _axis_order(self, value: torch.Tensor) -> tuple[int, ...] | None:
        """Return the axes from the largest stride to the smallest; ``None`` if there are gaps."""
        # The order of symbolic strides is that of the traced sizes.
        shape = [_hint(size, self.program) for size in value.shape]
        strides = [_hint(step, self.program) for step in value.stride()]
        return axis_order(shape, strides)

    def results(self, inputs: tuple[InputSpec, ...]) -> tuple[list[OutputSpec], list[_Returned]]:
        """Return the specs of the model's flat results, and the nodes that the graph returns."""
        indices = {s.placeholder: i for i, s in enumerate(inputs) if s.placeholder is not None}
        nodes: list[_Returned] = []
        specs: list[OutputSpec] = []
        for out in self.program.graph_signature.output_specs:
            if out.kind in _WRITES:
                continue
            _check_kind(out.kind)
            buffer = self.buffers.get(len(specs))
            is_input = self.returned.get(len(specs), out.arg.name)
            returned = is_input if buffer is None else ""
            match out.arg:
                case ConstantArgument(value=constant):
                    specs.append(OutputSpec(None, constant=constant))
                case TensorArgument() if returned in indices:
                    specs.append(OutputSpec(None, input_index=indices[returned]))
                case TensorArgument(name=name) | SymIntArgument(name=name):
                    specs.append(self._result(_Returned(name, buffer), nodes))
                case _:
                    raise CaptureError(f"the model returns {a_kind(out.arg)}")
        return specs, nodes

    def _result(self, node: _Returned, nodes: list[_Returned]) -> OutputSpec:
        value = self.values[node.name]
        if not isinstance(value, torch.Tensor):
            size = read_size(value, self.program)
            if isinstance(size, int):
                return OutputSpec(None, constant=size)
            text = self.sizes.express(size)
            if text is not None:
                return OutputSpec(None, size=text)
        # A tensor that is returned twice is one output.
        if node not in nodes:
            nodes.append(node)
        index = nodes.index(node)
        if not isinstance(value, torch.Tensor):
            return OutputSpec(index)
        if all(isinstance(step, int) for step in value.stride()):
            return OutputSpec(index, strides=tuple(value.stride()))
        sizes = [read_size(size, self.program) for size in value.shape]
        if any(not isinstance(size, int) and size.hint is None for size in sizes):
            return OutputSpec(index)  # a size that the trace does not know
        # Strides that depend on sizes differ from call to call; their order does not.
        return OutputSpec(index, order=self._axis_order(value))


def read_interface(
    program: ExportedProgram,
    leaves: list[Leaf],
    constants: dict[str, str],
    returned: dict[int, str],
    buffers: Mapping[int, ReturnedBuffer],
    parameters: Parameters,
) -> Interface:
    """Return the interface of ``program``.

    Args:
        program: The functional program.
        leaves: The leaves of the example call, in the order of its in_spec.
        constants: Names of the constants by placeholder.
        returned: Positions of outputs that are inputs, with the names of their placeholders.
        buffers: Positions of outputs that are buffers which the model writes, by position.
        parameters: The parameters of ``forward``.

    Raises:
        CaptureError: An input or output has an unsupported kind.
    """
    reader = _Reader(program, constants, returned, buffers)
    inputs = reader.inputs(leaves)
    writes = reader.writes(inputs)
    relations = reader.sizes.relations(guards_of(program))
    results, nodes = reader.results(inputs)
    spec = program.call_spec
    assert spec.in_spec is not None, "the program has no in_spec"
    assert spec.out_spec is not None, "the program has no out_spec"
    signature = Signature(
        spec.in_spec,
        inputs,
        spec.out_spec,
        tuple(results),
        tuple(mutation for _, _, mutation in writes),
        reader.sizes.symbols,
        parameters.names,
        relations,
        parameters.defaults,
    )
    outputs = (*(value for value, _, _ in writes), *(node.name for node in nodes))
    copied = {i: n.buffer.meta for i, n in enumerate(nodes, len(writes)) if n.buffer is not None}
    written = tuple(name for _, name, _ in writes if name is not None)
    return Interface(signature, outputs, copied, written)


def note_fixed_sizes(signature: Signature, leaves: list[Leaf], log: EventLog) -> None:
    """Warn about sizes that were requested to be dynamic but are static."""
    for spec, leaf in zip(signature.inputs, leaves, strict=True):
        for axis, dim in leaf.dims.items():
            if not is_dynamic(dim) or axis >= len(spec.shape) or isinstance(spec.shape[axis], str):
                continue
            why = "the example has 1 there" if spec.shape[axis] == 1 else "the model fixes it"
            log.add(
                Noted(
                    "capture",
                    f"axis {axis} of {leaf.name} was requested to be dynamic but stays "
                    f"{spec.shape[axis]}: {why}. Use an example of at least 2 there, and "
                    "torch.export.Dim with min=1 to allow 1",
                    warn=True,
                )
            )


def _check_kind(kind: OutputKind) -> None:
    if kind is not OutputKind.USER_OUTPUT:
        raise CaptureError(
            f"the program has an output of kind {kind.name}",
            fix="capture inference: no losses, gradients or effects",
        )


def _hint(size: int | torch.SymInt, program: ExportedProgram) -> int:
    known = read_size(size, program)
    if isinstance(known, int):
        return known
    return known.low if known.hint is None else known.hint
