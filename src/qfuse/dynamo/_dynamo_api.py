"""What Dynamo tells about a graph: this package's only file with private torch API."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from qfuse.ir.graph.memory import address_of, span_of
from qfuse.ir.sizes import Size

_INDEX = re.compile(r"\['?([^'\]]+)'?\]|\.([A-Za-z_]\w*)")
_REGISTRIES = frozenset({"_modules", "_parameters", "_buffers", "__dict__", "_modules_dict"})


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Suspend the trace of Dynamo, so that a graph of its own can be traced."""
    with torch._guards.tracing(None), torch.no_grad():
        yield


def is_static(node: Node) -> bool:
    """Whether a placeholder is a parameter, a buffer or another tensor that a module holds."""
    return "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})


def traced_value(node: Node) -> Any:
    """Return the fake value that Dynamo computed for a node."""
    return node.meta.get("example_value")


def memory_id(value: torch.Tensor) -> int | None:
    """Return what tells the memory of a fake tensor from others; ``None`` if it has none."""
    if value.layout is not torch.strided:
        return None
    return int(value.untyped_storage()._cdata)


def spans_of(value: Any) -> list[tuple[int, int]]:
    """Return the address ranges of a tensor, or of the tensors that it is made of."""
    if is_traceable_wrapper_subclass(value):
        names, _ = value.__tensor_flatten__()
        return [span for name in names for span in spans_of(getattr(value, name))]
    return [span_of(value)] if address_of(value) else []


def size_text(size: Size) -> str:
    """Return a size as an expression over symbols, in the syntax of Python."""
    from torch.utils._sympy.printers import PythonPrinter  # noqa: PLC0415

    return str(size) if isinstance(size, int) else PythonPrinter().doprint(size.node.expr)


def symbols_of(size: Size) -> set[str]:
    """Return the symbols that a size depends on."""
    return set() if isinstance(size, int) else {str(s) for s in size.node.expr.free_symbols}


def example_size(size: Size) -> int:
    """Return a size in the example, all of whose symbols are sizes of inputs."""
    return size if isinstance(size, int) else int(size.node.hint)


def sizes_of_inputs(placeholders: Sequence[Node]) -> dict[str, tuple[int, int | None]]:
    """Return the position and axis of the input that has each size that varies, by its expression.

    No axis means that the input is the size itself.
    """
    found: dict[str, tuple[int, int | None]] = {}
    for position, node in enumerate(placeholders):
        value = traced_value(node)
        axes = enumerate(value.shape) if isinstance(value, torch.Tensor) else [(None, value)]
        for axis, size in axes:
            if isinstance(size, torch.SymInt):
                found.setdefault(size_text(size), (position, axis))
    return found


def attribute_name(node: Node) -> str:
    """Return the name of a static input in the user's module: ``encoder.layer.0.weight``."""
    return plain_path(_source_name(node)) or str(node.target)


def input_name(node: Node) -> str:
    """Return the name of an input in the user's code: ``x``, or ``cache_k`` for ``cache["k"]``."""
    first, *rest = [a or b for a, b in _INDEX.findall(_source_name(node))] or [""]
    # The first part may be the local variable that holds the module.
    parts = rest if first == "self" or not _REGISTRIES.isdisjoint(rest) else [first, *rest]
    name = "_".join(part for part in parts if part not in _REGISTRIES)
    return name if name.isidentifier() and name != "self" else node.name


def _source_name(node: Node) -> str:
    source = getattr(getattr(node, "_dynamo_source", None), "name", "")
    return source() if callable(source) else str(source)


def plain_path(path: str) -> str:
    """Return ``fc.weight`` for ``L['self']._modules['fc']._parameters['weight']``."""
    # The first part is the local variable that holds the module.
    parts = [a or b for a, b in _INDEX.findall(path)][1:]
    return ".".join(part for part in parts if part not in _REGISTRIES)


def current_compilation() -> object | None:
    """Return the object of ``torch.compile`` that the current graph is compiled for."""
    from torch._dynamo.eval_frame import innermost_backend  # noqa: PLC0415
    from torch._dynamo.symbolic_convert import InstructionTranslator  # noqa: PLC0415

    try:
        function = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:
        # Called by something else than Dynamo.
        return None
    return innermost_backend(function) if function is not None else None


def compilation_of(compiled: object) -> object | None:
    """Return the object of ``torch.compile`` behind its result; ``None`` for anything else."""
    from torch._dynamo.eval_frame import OptimizedModule, innermost_backend  # noqa: PLC0415

    if isinstance(compiled, torch.nn.Module) and not isinstance(compiled, OptimizedModule):
        # `module.compile(backend="qfuse")` compiles in place.
        compiled = compiled._compiled_call_impl
    context = getattr(compiled, "dynamo_ctx", None)
    callback = getattr(context, "callback", None) or getattr(
        compiled, "_torchdynamo_orig_backend", None
    )
    for cell in getattr(compiled, "__closure__", None) or ():
        if callback is None and hasattr(cell.cell_contents, "_torchdynamo_orig_backend"):
            callback = cell.cell_contents
    return innermost_backend(callback) if callback is not None else None


def traced_module() -> torch.nn.Module | None:
    """Return the module whose ``forward`` Dynamo is tracing, if it is one."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # noqa: PLC0415

    try:
        local = InstructionTranslator.current_tx().output.root_tx.f_locals
    except AttributeError:
        return None
    # For a module of torch itself, Dynamo traces a function that calls its bound `forward`.
    for value in (local.get("self"), local.get("fn")):
        owner = getattr(value, "__self__", value)
        if isinstance(owner, torch.nn.Module):
            return owner
    return None


_CONTROL_FLOW = {
    "associative_scan": "a scan",
    "cond": "a branch that depends on the values of tensors",
    "map_impl": "a loop over a tensor",
    "scan": "a scan",
    "while_loop": "a loop that depends on the values of tensors",
}


def control_flow(node: Node) -> str | None:
    """Return what kind of control flow a node is, if it is."""
    target = node.target
    if not isinstance(target, torch._ops.HigherOrderOperator):
        return None
    return _CONTROL_FLOW.get(str(target))


def version_of(value: torch.Tensor) -> int:
    """Return a number that grows with each write to a tensor; 0 if torch does not count."""
    return 0 if value.is_inference() else value._version
