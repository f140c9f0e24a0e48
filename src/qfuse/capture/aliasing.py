"""Alias analysis of the traced graph, before functionalization.

The functional graph has only values. Only the traced graph, which still has in-place ops, shows
that an output is the mutated input itself, or that two writes go to the same tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from qfuse.ir.aten import aten
from qfuse.ir.graph.schema import arguments, is_call, overload_of

_COPIES_IF_NEEDED = (
    aten.contiguous.default,
    aten.to.device,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.other,
)


def _alias_source(node: Node, *, written: bool) -> Node | None:
    """Return the argument that the result of ``node`` is a view of, or that it mutates and returns.

    Args:
        node: Any node.
        written: Look for mutated arguments; otherwise for arguments that are not mutated.
    """
    op = overload_of(node)
    if op is None:
        return None
    schema = op._schema  # noqa: SLF001
    if len(schema.returns) != 1 or (info := schema.returns[0].alias_info) is None:
        return None
    if written != info.is_write:
        return None
    given = arguments(node)
    for formal in schema.arguments:
        other, value = formal.alias_info, given.get(formal.name)
        if other is not None and other.before_set & info.before_set and isinstance(value, Node):
            return value
    return None


def _viewed_in_parts(node: Node) -> Node | None:
    """Return the argument that an op such as ``split`` returns a list of views of."""
    op = overload_of(node)
    given = arguments(node) if op is not None else {}
    for formal in op._schema.arguments if op is not None else ():  # noqa: SLF001
        value, alias = given.get(formal.name), formal.alias_info
        # Schemas say `Tensor(a -> *)` of it: the views are no longer told apart.
        if alias is not None and "*" in alias.after_set and isinstance(value, Node):
            return value
    return None


def _same_tensor(node: Node) -> Node | None:
    """Return the argument that the result of ``node`` is identical to: mutated, or not copied."""
    source = _alias_source(node, written=True)
    if source is not None or not is_call(node, *_COPIES_IF_NEEDED):
        return source
    source = _alias_source(node, written=False)
    if source is None or arguments(node).get("copy") is True:
        return None
    old, new = source.meta["val"], node.meta["val"]
    # `to` and `contiguous` return the tensor itself where nothing has to change.
    same = (old.dtype, old.device, old.stride()) == (new.dtype, new.device, new.stride())
    return source if same else None


def _bases(program: ExportedProgram) -> dict[Node, Node]:
    """Return the tensor that each node is or is a view of; of other nodes, the node itself."""
    base: dict[Node, Node] = {}
    for node in program.graph.nodes:
        # An op that returns the argument that it wrote is followed first; a view leads to its base.
        source = _alias_source(node, written=True) or _alias_source(node, written=False)
        if node.target is operator.getitem and isinstance(made := node.args[0], Node):
            source = _viewed_in_parts(made)
        base[node] = base[source] if source is not None else node
    return base


def written_inputs(program: ExportedProgram) -> set[str]:
    """Return the names of the placeholders that the graph mutates, directly or through views."""
    return _written(program, _bases(program))


def _written(program: ExportedProgram, base: Mapping[Node, Node]) -> set[str]:
    written = {
        spec.target or ""
        for spec in program.graph_signature.output_specs
        if spec.kind is OutputKind.USER_INPUT_MUTATION
    }
    for node in program.graph.nodes:
        op = overload_of(node)
        given = arguments(node) if op is not None else {}
        for formal in op._schema.arguments if op is not None else ():  # noqa: SLF001
            value = given.get(formal.name)
            is_write = formal.alias_info is not None and formal.alias_info.is_write
            if is_write and isinstance(value, Node):
                written.add(base[value].name)
    return written


def returned_inputs(program: ExportedProgram) -> dict[int, str]:
    """Return the inputs that the model returns, by position among the user's outputs.

    An input that is mutated and returned is still that input. The functional graph cannot
    distinguish it from a new tensor that is copied into the input; the traced graph can.
    """
    inputs = {
        spec.arg.name
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.USER_INPUT
    }
    found = {}
    for position, value in enumerate(_results(program)):
        node = value
        # Through any number of writes, and of casts that do nothing.
        while isinstance(node, Node) and (source := _same_tensor(node)) is not None:
            node = source
        if isinstance(node, Node) and node.op == "placeholder" and node.name in inputs:
            found[position] = node.name
    return found


@dataclass(frozen=True, slots=True)
class ReturnedBuffer:
    """An output of the user that is a buffer which the model writes, or a view of it.

    Attributes:
        tensor: Outputs with the same name are the same tensor.
        meta: The metadata of the node that made it, or else of the last one that wrote the buffer.
    """

    tensor: str
    meta: dict[str, Any] = field(compare=False)


def returned_buffers(program: ExportedProgram) -> dict[int, ReturnedBuffer]:
    """Return the user's outputs that are buffers which the model writes, by position.

    The functional graph has the value that was written in their place: another tensor, which the
    caller or another output may hold. A program that is functional already does not tell the two
    apart: there, these are all outputs that are a written value.
    """
    base, specs = _bases(program), program.graph_signature
    writes = _written(program, base)
    values = cast("Sequence[Any]", program.graph.output_node().args[0])
    placeholders = {spec.target: spec.arg.name for spec in specs.input_specs}
    written: set[Node] = set()
    for value, spec in zip(values, specs.output_specs, strict=True):
        # Written by no op of the graph.
        if spec.kind is OutputKind.BUFFER_MUTATION and placeholders[spec.target] not in writes:
            written.add(base[value])
    buffers = {
        spec.arg.name
        for spec in specs.input_specs
        if spec.kind is not InputKind.USER_INPUT and spec.arg.name in writes
    }
    last = {base[node]: node for node in program.graph.nodes if overload_of(node) is not None}
    found: dict[int, ReturnedBuffer] = {}
    for position, value in enumerate(_results(program)):
        if not isinstance(value, Node):
            continue
        made = value if value.op == "call_function" else last.get(base[value], value)
        if base[value].name in buffers:
            found[position] = ReturnedBuffer(value.name, made.meta)
        elif base[value] in written:
            found[position] = ReturnedBuffer(f"{value.name}, output {position}", made.meta)
    return found


def _results(program: ExportedProgram) -> list[Any]:
    """Return the user's outputs."""
    specs = program.graph_signature.output_specs
    values = cast("Sequence[Any]", program.graph.output_node().args[0])
    return [v for v, s in zip(values, specs, strict=True) if s.kind is OutputKind.USER_OUTPUT]
