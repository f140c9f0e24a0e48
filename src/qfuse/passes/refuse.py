"""Checks that a pass supports a graph; errors name the unsupported node."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from qfuse.capture.provenance import UserFiles, source_line
from qfuse.ir.errors import GraphError
from qfuse.ir.graph.schema import is_call
from qfuse.ir.signature._tree_api import is_subclass
from qfuse.ir.words import a_kind
from qfuse.passes._torch_api import called_kind, is_fake, is_guards
from qfuse.passes.in_place import functional_of
from qfuse.rewrite.prelude import Node, OpOverload

_FUNCTIONAL = (
    "make it functional: torch.export.export(...).run_decompositions({}).module(), "
    "or make_fx of torch.func.functionalize(f)"
)
_TO_ATEN = "trace it to calls of torch.ops: torch.export.export(...).module(), or make_fx"
_SCALARS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
_COPY = torch.ops.aten.copy_.default


def check_graph(module: object) -> GraphModule:
    """Return ``module`` if passes support its whole graph.

    Raises:
        GraphError: They do not; the message names the node and the line of the user's source.
    """
    if isinstance(module, ExportedProgram):
        raise GraphError("a pass was given an ExportedProgram", fix="pass program.module()")
    if not isinstance(module, GraphModule):
        raise GraphError(
            f"a pass was given {a_kind(module)}, not a torch.fx.GraphModule", fix=_TO_ATEN
        )
    writes: list[Node] = []
    for node in module.graph.nodes:
        # The functional copy reads all first and writes last, so nothing may read after a write.
        if writes and node.op != "output" and not is_call(node, _COPY):
            raise _reads_late(writes[0], node)
        if _check_node(module, node):
            writes.append(node)
    return module


def refused(node: Node, what: str, fix: str) -> GraphError:
    """Return the error for an unsupported node."""
    line = source_line(node.meta.get("stack_trace"), UserFiles())
    where = f"%{node.name} = {node.op} {node.target}" + (f" in {line}" if line else "")
    return GraphError(what, where=where, fix=fix)


def is_aside(module: GraphModule, node: Node) -> bool:
    """Whether a node is an input guard of torch.export, which has no result."""
    if node.op != "call_module" or node.users:
        return False
    return is_guards(module.get_submodule(str(node.target)))


def attribute_of(module: GraphModule, node: Node) -> Any:
    """Return the attribute that a ``get_attr`` node refers to.

    Raises:
        GraphError: The module has no such attribute.
    """
    value: Any = module
    for name in str(node.target).split("."):
        if not hasattr(value, name):
            fix = "add the attribute to the module, or erase the node"
            raise refused(node, f"the module has no attribute {node.target}", fix)
        value = getattr(value, name)
    return value


def _check_node(module: GraphModule, node: Node) -> bool:
    """Check a node; return whether it writes to a tensor that outlives the call."""
    match node.op:
        case "get_attr":
            _check_constant(module, node)
        case "call_function":
            return _check_call(node)
        case "call_module" if not is_aside(module, node):
            called = type(module.get_submodule(str(node.target))).__name__
            raise refused(node, f"the graph calls a module ({called})", _TO_ATEN)
        case "call_method":
            raise refused(node, f"the graph calls a method ({node.target})", _TO_ATEN)
        case _:
            pass
    return False


def _check_constant(module: GraphModule, node: Node) -> None:
    value = attribute_of(module, node)
    if isinstance(value, torch.nn.Module):
        fix = "run the pass on the subgraph, or use torch.where instead"
        raise refused(node, "the graph contains a subgraph", fix)
    if not isinstance(value, torch.Tensor):
        fix = "make it an argument of the call that uses it"
        raise refused(node, f"the graph uses {a_kind(value)}, not a tensor", fix)
    if is_subclass(value) and not is_fake(value):
        fix = "decompose it into plain tensors: program.run_decompositions({}).module()"
        raise refused(node, f"the graph uses {a_kind(value)}", fix)


def _check_call(node: Node) -> bool:
    if isinstance(node.target, OpOverload):
        if not _writes(node) or functional_of(node) is not None:
            return False
        target = node.args[0] if is_call(node, _COPY) else None
        # Other targets are values of the graph, whose later users would have to see the write.
        if not isinstance(target, Node) or target.op not in {"get_attr", "placeholder"}:
            raise refused(node, f"{node.target} writes to its argument", _FUNCTIONAL)
        # In the copy the result stands for the target before the write.
        if any(user.op != "output" for user in node.users):
            raise refused(node, "the result of copy_ is used", _FUNCTIONAL)
        return True
    kind = called_kind(node.target)
    if kind:
        raise refused(node, f"the graph calls {node.target}, which {kind}", _TO_ATEN)
    if node.target is not operator.getitem and not _is_scalar(node):
        name = getattr(node.target, "__name__", str(node.target))
        raise refused(node, f"the graph calls {name}, which is not an op of torch.ops", _TO_ATEN)
    return False


def _writes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable  # noqa: SLF001


def _is_scalar(node: Node) -> bool:
    """Whether a call computes only with sizes."""
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    return all(isinstance(value, _SCALARS) for value in values)


def _reads_late(write: Node, node: Node) -> GraphError:
    return refused(
        node, f"it comes after %{write.name}, which writes to an input or a buffer", _FUNCTIONAL
    )
