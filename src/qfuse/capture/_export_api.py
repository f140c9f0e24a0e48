"""torch.export and its private neighbours, behind a few functions: the room's only such file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import TreeSpec

CONSTANT_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@contextmanager
def _quiet() -> Iterator[None]:
    """No gradients, and no inference mode: its tensors cannot be traced."""
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def export(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
) -> ExportedProgram:
    """Trace ``model``. What it raises is listed by :func:`trace_errors`."""
    with _quiet():
        return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)


def decompose(program: ExportedProgram, *, autocast: bool) -> ExportedProgram:
    """Make the graph functional and its tensors plain; no operator that has a name is taken apart.

    Args:
        program: What :func:`export` made, or what a user made elsewhere.
        autocast: Whether an ambient autocast is part of the program. It is when the model is
            called here; a program that was exported earlier does not know of it.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        for device in [] if autocast else devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        functional: ExportedProgram = program.run_decompositions({})
    return functional


def trace_errors() -> tuple[type[Exception], ...]:
    """Return the types of what tracing a model raises, the model's own mistakes included."""
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
    """Return what torch says is wrong: "data", "sizes", "input", "output", "fake" or ""."""
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


def is_subclass(value: object) -> bool:
    """Return whether ``value`` is a tensor that wraps others, such as a quantized one."""
    return is_traceable_wrapper_subclass(value)


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


def unflatten(leaves: Sequence[Any], spec: TreeSpec) -> Any:
    """Return the tree of structure ``spec`` with ``leaves``."""
    return pytree.tree_unflatten(leaves, spec)


def flatten_with_paths(tree: object) -> list[tuple[tuple[tuple[Any, str], ...], Any]]:
    """Return each leaf with its path: keys, each with its spelling, such as ``.a`` or ``[0]``.

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
    """Teach torch to look into containers of class ``kind``, unless it knows how already.

    Args:
        kind: The class.
        flatten_named: From a container to its children by attribute, and its fixed part.
        build: From the children and the fixed part to a container.
    """
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
class Size:
    """A symbolic size as torch derived it.

    Attributes:
        text: The expression over root symbols, as Python spells it.
        roots: Names of the root symbols; one that equals ``text`` is the size itself.
        linear: ``(a, b)`` when the size is ``a * root + b`` for its only root.
        low: Least value that it may have.
        hint: Value in the trace; ``None`` for a size that depends on data.
        high: Greatest value; ``None`` if there is none.
    """

    text: str
    roots: tuple[str, ...]
    linear: tuple[int, int] | None
    low: int
    hint: int | None
    high: int | None


def read_size(size: int | torch.SymInt, program: ExportedProgram) -> int | Size:
    """Return what is known about one size of a fake tensor of ``program``."""
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
        if factor.is_Integer and rest.is_Integer and factor > 0:
            linear = (int(factor), int(rest))
    low, high = bounds.lower, bounds.upper
    # Sizes without a bound come as infinity, as an infinite integer, or as 2^63 - 2.
    bounded = high.is_Integer and int(high) < torch.iinfo(torch.int64).max - 1
    return Size(
        PythonPrinter().doprint(expr),
        tuple(str(root) for root in roots),
        linear,
        max(0, int(low)) if low.is_Integer else 0,
        size.node.hint,
        int(high) if bounded else None,
    )


def guards_of(program: ExportedProgram) -> list[str]:
    """Return the conditions on input sizes that the trace relied on, over ``L['x'].size()[0]``."""
    return list(program._guards_code)


def orig_arg_names(program: ExportedProgram) -> tuple[str, ...]:
    """Return the names of the parameters of the exported ``forward``, as far as they are kept."""
    top = program.module_call_graph[0].signature
    return tuple(top.forward_arg_names or ()) if top is not None else ()


def keyword_names(in_spec: TreeSpec) -> list[str]:
    """Return the names of the keyword arguments of a call, in the order of its structure."""
    return list(in_spec.child(1).context or ())


def as_value(node: Node) -> Any:
    """Return the fake value of ``node``, which never requires gradients."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.requires_grad:
        with torch.no_grad():
            return value.detach()
    return value


def higher_order_name(node: Node) -> str | None:
    """Return the name of the higher-order operator that ``node`` calls, if it does."""
    target = node.target
    return str(target) if isinstance(target, HigherOrderOperator) else None


def build_module(
    program: ExportedProgram,
    constants: Mapping[str, tuple[str, torch.Tensor]],
    outputs: Sequence[str],
    kept: Sequence[str],
) -> GraphModule:
    """Copy the graph of ``program`` into a plain module with flat inputs and outputs.

    Only what the outputs need is copied, so assertions, which nothing uses, fall away.

    Args:
        program: The functional program.
        constants: For each placeholder that is a constant, its name in the module and its value.
        outputs: Names of the nodes to return, in order.
        kept: Names of placeholders to keep although nothing reads them, since they are written.
    """
    nodes = {node.name: node for node in program.graph.nodes}
    live = _live([nodes[name] for name in (*outputs, *kept)])
    graph = Graph()
    copied: dict[Node, Node] = {}
    placeholders = program.graph.find_nodes(op="placeholder")
    user = [n for n in placeholders if n.name not in constants]
    for node in user:
        if isinstance(node.meta.get("val"), torch.Tensor):
            copied[node] = graph.create_node("placeholder", node.name, name=node.name)
    made: dict[str, Node] = {}
    for node in placeholders:
        if node in live and node not in copied:
            target = constants[node.name][0]
            if target not in made:
                name = target.replace(".", "_")
                made[target] = graph.create_node("get_attr", target, name=name)
            copied[node] = made[target]
    for node in program.graph.nodes:
        if node in live and node not in copied:
            copied[node] = graph.node_copy(node, copied.__getitem__)
    for old, new in copied.items():
        new.meta = {**old.meta, "val": as_value(old)}
    graph.output(tuple(copied[nodes[name]] for name in outputs))
    values = dict(constants.values())
    return GraphModule({name: values[name] for name in made}, graph, class_name="Captured")


def _live(roots: Sequence[Node]) -> set[Node]:
    live: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            stack += node.all_input_nodes
    return live
