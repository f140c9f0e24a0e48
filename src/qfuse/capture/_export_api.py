"""Wrappers of torch.export and its private API: this package's only file with private torch API."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from traceback import StackSummary
from typing import Any, cast

import torch
from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node
from torch.fx.graph import _PyTreeCodeGen
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec

from qfuse.capture.this_thread import call_original, own_annotations, replaced
from qfuse.ir.signature._tree_api import is_subclass

CONSTANT_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@contextmanager
def _quiet() -> Iterator[None]:
    """Disable gradients and inference mode, whose tensors cannot be traced."""
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def export(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    owns: Callable[[str], bool],
    *,
    strict: bool = False,
) -> ExportedProgram:
    """Trace ``model``; :func:`trace_errors` lists the errors that this raises.

    Args:
        model: The model.
        args: Positional arguments of the example call.
        kwargs: Keyword arguments of the example call.
        dynamic_shapes: In the format of ``torch.export.export``.
        owns: Whether a file is the user's: the nodes keep their frames in such files.
        strict: Trace the bytecode of ``forward``, which recognizes a buffer that a plain object
            holds too.
    """
    with _quiet(), _without_empty_buffers(model), _with_user_frames(owns), _alone():
        return torch.export.export(
            model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=strict
        )


@contextmanager
def _with_user_frames(owns: Callable[[str], bool]) -> Iterator[None]:
    """Keep the user's frames inside ``forward`` in the stack traces of nodes for a while.

    torch.export keeps only functions named ``forward``, so a line of a method that ``forward``
    calls would be reported as the line of the call.
    """
    from torch.fx.experimental.proxy_tensor import _ModuleStackTracer  # noqa: PLC0415

    def kept(_tracer: Any, frames: StackSummary) -> StackSummary:
        names = [frame.name for frame in frames]
        inner = frames[names.index("forward") :] if "forward" in names else []
        return StackSummary.from_list(
            [frame for frame in inner if frame.name == "forward" or owns(frame.filename)]
        )

    _ModuleStackTracer._filter_traceback_frames = kept  # type: ignore[assignment]
    try:
        yield
    finally:
        # Deleted, and not set to what it was: another thread may have begun or ended meanwhile.
        if "_filter_traceback_frames" in vars(_ModuleStackTracer):
            del _ModuleStackTracer._filter_traceback_frames


@contextmanager
def _without_empty_buffers(model: torch.nn.Module) -> Iterator[None]:
    """Make buffers of the root module that are ``None`` plain attributes for a while.

    torch.export counts them among the buffers that were written, and fails with an IndexError.
    """
    buffers = model._buffers
    before, attributes = dict(buffers), vars(model)
    empty = [name for name, value in before.items() if value is None and name not in attributes]
    for name in empty:
        del buffers[name]
        attributes[name] = None
    try:
        yield
    finally:
        for name in empty:
            attributes.pop(name, None)
        buffers.clear()
        buffers.update(before)


_CODE = ("forward", "_code", "_lineno_map", "_prologue_start")


@contextmanager
def _alone() -> Iterator[None]:
    """Trace without code that is not read, and without notes of what other threads call."""
    # Dynamo keeps the functions that it finds in torch: not those that replace them here.
    import torch._dynamo.variables.torch  # noqa: F401, PLC0415

    with late_code(), own_annotations():
        yield


@contextmanager
def late_code() -> Iterator[None]:
    """Write the Python code of a graph module when it is read, and not after each of its edits.

    torch.export writes the code of the whole model some forty times and runs none of it. Other
    threads write theirs at once, as always.
    """
    with replaced(GraphModule, "recompile", here=_defer, elsewhere=call_original):
        yield


def _defer(write: Callable[[GraphModule], Any], module: GraphModule) -> None:
    """Forget the code of ``module``; what looks it up writes it."""
    codegen = module._graph._codegen
    if isinstance(codegen, _PyTreeCodeGen):
        module._in_spec = codegen.pytree_info.in_spec
        module._out_spec = codegen.pytree_info.out_spec
    # Each graph module has a class of its own.
    for name in _CODE:
        vars(module).pop(name, None)
        setattr(type(module), name, _Late(name, module, write))


class _Late:
    """An attribute of a graph module that exists when its code is written."""

    def __init__(self, name: str, module: GraphModule, write: Callable[[GraphModule], Any]) -> None:
        self._name = name
        self._module = weakref.ref(module)
        self._write = write

    def __get__(self, instance: GraphModule | None, owner: type[GraphModule]) -> Any:
        module = self._module() if instance is None else instance
        assert module is not None, "the class of a graph module does not outlive it"
        for name in _CODE:
            if isinstance(vars(type(module)).get(name), _Late):
                delattr(type(module), name)
        self._write(module)
        return getattr(owner if instance is None else instance, self._name)


def decompose(program: ExportedProgram, *, autocast: bool) -> ExportedProgram:
    """Make the graph functional and its tensors plain, without decomposing any operator.

    Args:
        program: The result of :func:`export`, or a user's program.
        autocast: Whether an ambient autocast is part of the program: true if the model is traced
            here, false for a program that was exported earlier.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        stack.enter_context(_alone())
        # A program that was exported earlier has its casts; an ambient autocast would add others.
        for device in [] if autocast else devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        functional: ExportedProgram = program.run_decompositions({})
    return functional


def trace_errors() -> tuple[type[Exception], ...]:
    """Return the exception types that tracing can raise, including those of the model's code."""
    from torch._export.error import ExportError, InternalError  # noqa: PLC0415
    from torch._export.verifier import SpecViolationError  # noqa: PLC0415

    return (
        RuntimeError,
        TypeError,
        ValueError,
        AttributeError,
        LookupError,
        ArithmeticError,
        AssertionError,
        ImportError,
        NameError,
        ExportError,
        InternalError,
        SpecViolationError,
    )


def error_kind(error: Exception) -> str:
    """Classify an error of torch: "data", "sizes", "input", "output", "fake" or ""."""
    from torch._dynamo.exc import UserError, UserErrorType  # noqa: PLC0415
    from torch._subclasses.fake_tensor import (  # noqa: PLC0415
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    )
    from torch.fx.experimental.symbolic_shapes import (  # noqa: PLC0415
        ConstraintViolationError,
        GuardOnDataDependentSymNode,
    )

    data = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)
    if isinstance(error, data):
        return "data"
    if isinstance(error, ConstraintViolationError):
        return "sizes"
    if isinstance(error, UnsupportedOperatorException):
        return "fake"
    if not isinstance(error, UserError):
        return ""
    return {
        UserErrorType.DYNAMIC_CONTROL_FLOW: "data",
        UserErrorType.CONSTRAINT_VIOLATION: "sizes",
        UserErrorType.DYNAMIC_DIM: "sizes",
        UserErrorType.INVALID_INPUT: "sizes" if "dynamic_shapes" in str(error) else "input",
        UserErrorType.INVALID_OUTPUT: "output",
    }.get(error.error_type, "")


def plain_parts(name: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the plain tensors inside ``value``, each with its dotted name."""
    if not is_subclass(value):
        yield name, value
        return
    attributes: list[str] = cast("Any", value).__tensor_flatten__()[0]
    for attribute in attributes:
        yield from plain_parts(f"{name}.{attribute}", getattr(value, attribute))


def flatten(tree: object) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of ``tree`` and its structure."""
    return pytree.tree_flatten(tree)


def flatten_with_paths(tree: object) -> list[tuple[tuple[tuple[Any, str], ...], Any]]:
    """Return each leaf with its path: keys, each with its text, such as ``.a`` or ``[0]``.

    A key is an index, the key of a dictionary, or the name of an attribute.
    """
    found = []
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        found.append((tuple((_key(entry), str(entry)) for entry in path), leaf))
    return found


def _key(entry: Any) -> Any:
    match entry:
        case pytree.SequenceKey(idx=index):
            return index
        case pytree.MappingKey(key=key):
            return key
        case pytree.GetAttrKey(name=name):
            return name
        case _:
            return str(entry)


def register_container(
    kind: type,
    flatten_named: Callable[[Any], tuple[dict[str, Any], Any]],
    build: Callable[[Sequence[Any], Any], Any],
) -> None:
    """Register the container class ``kind`` with torch's pytree, unless it is registered.

    Args:
        kind: The class.
        flatten_named: Maps a container to its children by attribute, and its context.
        build: Maps the children and the context to a container.
    """
    # The library may have registered it; torch refuses a second registration.
    if kind in pytree.SUPPORTED_NODES:
        return

    def children(container: Any) -> tuple[list[Any], Any]:
        named, fixed = flatten_named(container)
        return list(named.values()), fixed

    def keyed(container: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], Any]:
        named, fixed = flatten_named(container)
        return [(pytree.GetAttrKey(name), child) for name, child in named.items()], fixed

    pytree.register_pytree_node(
        kind,
        children,
        cast("Any", build),
        serialized_type_name=f"{kind.__module__}.{kind.__name__}",
        flatten_with_keys_fn=keyed,
    )
    torch.fx._pytree.register_pytree_flatten_spec(kind, lambda value, _spec: children(value)[0])


@dataclass(frozen=True, slots=True)
class DerivedSize:
    """A symbolic size in torch's terms.

    Attributes:
        text: The expression over root symbols, as Python source.
        roots: Names of the root symbols; if one equals ``text``, the size is that root.
        linear: ``(a, b)`` when the size is ``a * root + b`` for its only root.
        low: Least value.
        hint: Value in the trace; ``None`` for a data-dependent size.
        high: Greatest value; ``None`` if unbounded.
    """

    text: str
    roots: tuple[str, ...]
    linear: tuple[int, int] | None
    low: int
    hint: int | None
    high: int | None


def read_size(size: int | torch.SymInt, program: ExportedProgram) -> int | DerivedSize:
    """Return the properties of one size of a fake tensor of ``program``."""
    if isinstance(size, int):
        return size
    from torch.utils._sympy.printers import PythonPrinter  # noqa: PLC0415
    from torch.utils._sympy.value_ranges import bound_sympy  # noqa: PLC0415

    expr = size.node.expr
    if expr.is_Integer:
        return int(expr)
    ranges = program.range_constraints
    roots = sorted(expr.free_symbols, key=str)
    bounds = bound_sympy(expr, {root: ranges[root] for root in roots if root in ranges})
    if expr in ranges:
        bounds &= ranges[expr]
    linear = None
    if len(roots) == 1:
        factor = expr.coeff(roots[0])
        rest = (expr - factor * roots[0]).expand()
        # Only such a size can be solved for its root: `s = (size - b) / a`.
        if factor.is_Integer and rest.is_Integer and factor > 0:
            linear = (int(factor), int(rest))
    low, high = bounds.lower, bounds.upper
    # torch represents a missing bound as infinity, an infinite integer, or 2^63 - 2.
    bounded = high.is_Integer and int(high) < torch.iinfo(torch.int64).max - 1
    return DerivedSize(
        PythonPrinter().doprint(expr),
        tuple(str(root) for root in roots),
        linear,
        max(0, int(low)) if low.is_Integer else 0,
        size.node.hint,
        int(high) if bounded else None,
    )


def guards_of(program: ExportedProgram) -> list[str]:
    """Return the guards on input sizes that the trace assumed, over ``L['x'].size()[0]``."""
    return list(program._guards_code)


def orig_arg_names(program: ExportedProgram) -> tuple[str, ...]:
    """Return the parameter names of the exported ``forward``, if the program has them."""
    top = program.module_call_graph[0].signature
    return tuple(top.forward_arg_names or ()) if top is not None else ()


def keyword_names(in_spec: TreeSpec) -> list[str]:
    """Return the names of the keyword arguments of a call, in the order of its structure."""
    return list(in_spec.child(1).context or ())


def as_value(node: Node) -> Any:
    """Return the fake value of ``node``, detached from autograd."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.requires_grad:
        with torch.no_grad():
            return value.detach()
    return value


def higher_order_name(node: Node) -> str | None:
    """Return the name of the higher-order operator that ``node`` calls, if any."""
    target = node.target
    return str(target) if isinstance(target, HigherOrderOperator) else None


def generated_lines(module: GraphModule) -> dict[int, Node]:
    """Return the nodes of a graph by the line of its generated code, which may be older."""
    nodes, start = dict(enumerate(module.graph.nodes)), module._prologue_start
    return {start + at: nodes[n] for at, n in (module._lineno_map or {}).items() if n in nodes}
