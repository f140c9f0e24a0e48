"""The constants of a program: one name per tensor, shared with the user's module, never copied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec

from qfuse.capture._export_api import CONSTANT_KINDS, plain_parts
from qfuse.ir.errors import CaptureError
from qfuse.ir.signature._tree_api import is_subclass
from qfuse.ir.words import a_kind


def collect_constants(
    traced: ExportedProgram, program: ExportedProgram
) -> dict[str, tuple[str, torch.Tensor]]:
    """Return the name and value of each placeholder that is a constant.

    Tied tensors, including tensors with the same memory, shape and strides, get the first of their
    names. The plain tensors inside a quantized weight are named after it: ``fc.weight.qdata``.

    Args:
        traced: The program before decomposition, whose weights are the user's tensors.
        program: The functional program, whose weights are plain.
    """
    inside = {
        _identity(part): part_name
        for name, value in _tensors(traced).items()
        for part_name, part in plain_parts(name, value)
        if part is not value
    }
    values = _tensors(program)
    first: dict[object, str] = {}
    for name, value in values.items():
        first.setdefault(_identity(value), inside.get(_identity(value), name))
    found = {}
    for spec in _constants(program):
        value = values[spec.target or ""]
        # Buffers are the user's tensors, so that writes to them are visible in the user's module.
        is_own = not isinstance(value, torch.nn.Parameter) and not value.requires_grad
        found[spec.arg.name] = (first[_identity(value)], value if is_own else value.detach())
    return found


def check_names(traced: ExportedProgram) -> None:
    """Refuse attributes with names that torch.fx reserves, which would fail later in torch.export.

    Raises:
        CaptureError: The model has an attribute such as ``code`` or ``graph``.
    """
    # What a GraphModule has beyond a plain module: `code`, `graph`, `recompile`, ...
    own = dir(torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph()))
    reserved = set(own) - set(dir(torch.nn.Module()))
    for name in _tensors(traced):
        head = name.split(".", maxsplit=1)[0]
        if head in reserved:
            raise CaptureError(
                f"the model's attribute {head!r} has a name that is reserved by torch.fx",
                fix="rename it, or make the model a submodule of another module",
            )


def check_written(traced: ExportedProgram, written: set[str]) -> None:
    """Refuse writes that a functional graph cannot apply to the source's tensors.

    Raises:
        CaptureError: ``forward`` writes a tensor that is not a buffer, or one that shares memory
            with another one.
    """
    values = _tensors(traced)
    constants = [spec for spec in _constants(traced) if spec.target in values]
    for spec in constants:
        if spec.arg.name not in written:
            continue
        if spec.kind is InputKind.CONSTANT_TENSOR:
            raise CaptureError(
                f"forward writes {spec.target}, a tensor that is not a buffer",
                fix=f"register it: self.register_buffer({str(spec.target).split('.')[-1]!r}, ...)",
            )
        for other in constants:
            a, b = values[str(spec.target)], values[str(other.target)]
            # The functional graph reads the other one before the write, the source after it.
            if other is not spec and _storage(a) == _storage(b) != 0:
                raise CaptureError(
                    f"forward writes {spec.target}, which shares memory with {other.target}",
                    fix="keep one of them as a buffer, and take views of it in forward",
                )


def check_returned(program: ExportedProgram) -> None:
    """Refuse a result that is a quantized weight, of which only the parts are in a plain graph.

    Raises:
        CaptureError: There is one, as of a graph that Dynamo breaks in the code of the tensor.
    """
    held = {s.arg.name: s.target for s in program.graph_signature.input_specs}
    values = _tensors(program)
    for output in program.graph_signature.output_specs:
        name = held.get(getattr(output.arg, "name", "")) or ""
        value = values.get(name)
        if is_subclass(value):
            raise CaptureError(
                f"the model returns {name}, {a_kind(value)}, and results are plain tensors",
                fix="return a tensor that is computed from it, such as its dequantize()",
            )


def writes_shared_buffer(
    model: torch.nn.Module, traced: ExportedProgram, written: set[str]
) -> bool:
    """Whether ``forward`` writes a buffer of ``model`` through an object that is not a module.

    Such a buffer is traced as two tensors: as a buffer, and as a constant that is written.
    """
    values, buffers = _tensors(traced), {_identity(buffer) for buffer in model.buffers()}
    return any(
        spec.kind is InputKind.CONSTANT_TENSOR
        and spec.arg.name in written
        and spec.target in values
        and _identity(values[spec.target]) in buffers
        for spec in _constants(traced)
    )


def _constants(program: ExportedProgram) -> Iterable[InputSpec]:
    return (s for s in program.graph_signature.input_specs if s.kind in CONSTANT_KINDS)


def _tensors(program: ExportedProgram) -> dict[str, torch.Tensor]:
    held: Mapping[str, object] = {**program.state_dict, **program.constants}
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}


def _storage(value: torch.Tensor) -> int:
    """Return the address of a tensor's memory, 0 for one without a single storage."""
    parts = list(plain_parts("", value))
    if len(parts) != 1 or value.is_meta or value.layout is not torch.strided:
        return 0
    return value.untyped_storage().data_ptr()


def _identity(value: torch.Tensor) -> object:
    """Return a key that is equal for tensors with the same memory and layout."""
    address = _storage(value)
    if not address:
        return id(value)
    return address, value.storage_offset(), value.shape, value.stride(), value.dtype
