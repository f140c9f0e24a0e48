"""Only the rewriter edits graphs; a few named files may build fresh ones."""

from __future__ import annotations

import ast
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, Module, modules, write_tree

MAY_EDIT = {
    "rewrite/rewriter.py": "the only editor: keeps meta, provenance and the event list",
    "rewrite/transaction.py": "takes over what a rewritten copy of somebody's graph has become",
    "capture/module.py": "copies what torch.export made into a fresh plain graph",
    "capture/grad.py": "changes an argument in a traced program for a while, and restores it",
    "backends/*.py": "builds the graph that it hands to its compiler; nobody reads it afterwards",
    "dynamo/weights.py": "copies a graph of Dynamo into one that holds its weights",
    "exported/build.py": "copies a lowered graph into that of an exported program",
    "saving/graphs.py": "builds the graph of a file that is loaded",
    "passes/raw.py": "copies a caller's graph into a plain one, and the rewritten one back",
    "testing/build.py": "builds the small graphs of the tests by hand",
    "zoo/_torchao_api.py": "clears dead nodes before quantizing: torchao's quantizer fails on them",
}

EDITING_CALLS = frozenset(
    {
        # torch.fx.Graph
        *("call_function", "call_method", "call_module", "create_node", "get_attr"),
        *("eliminate_dead_code", "erase_node", "graph_copy", "node_copy", "output", "placeholder"),
        *("inserting_after", "inserting_before"),
        # torch.fx.Node
        *("insert_arg", "prepend", "replace_all_uses_with", "replace_input_with"),
        *("update_arg", "update_kwarg", "_update_args_kwargs"),
        # torch.fx.GraphModule
        *("add_submodule", "delete_all_unused_submodules", "delete_submodule"),
    }
)
EDITING_STORES = frozenset({"args", "graph", "kwargs", "op", "target"})
REWRITERS = frozenset({"rw", "rewriter"})


def last_name(node: ast.expr) -> str:
    """``rw`` for ``rw`` and for ``self._rw``."""
    if isinstance(node, ast.Attribute):
        return node.attr.strip("_")
    return node.id.strip("_") if isinstance(node, ast.Name) else ""


def called_edit(call: ast.Call) -> str | None:
    """The edit that ``call`` does to a graph, if it does one and not through a rewriter."""
    match call.func:
        case ast.Attribute(value=receiver, attr=name) if name in EDITING_CALLS:
            return None if last_name(receiver) in REWRITERS else f".{name}(...)"
        case ast.Name(id="setattr") if len(call.args) > 1:
            match call.args[1]:
                case ast.Constant(value=str() as name) if name in EDITING_STORES:
                    return f".{name} = ..."
    return None


def stored_edit(node: ast.Attribute) -> str | None:
    """The edit of a store or delete such as ``node.args = ...``, unless on ``self``."""
    own = isinstance(node.value, ast.Name) and node.value.id == "self"
    if isinstance(node.ctx, ast.Load) or own or node.attr not in EDITING_STORES:
        return None
    return f".{node.attr} = ..."


def edits(module: Module) -> list[str]:
    """Every place in ``module`` that edits a graph."""
    found = []
    for node in ast.walk(module.tree):
        edit = None
        if isinstance(node, ast.Call):
            edit = called_edit(node)
        elif isinstance(node, ast.Attribute):
            edit = stored_edit(node)
        if edit is not None:
            found.append(module.at(node, edit))
    return found


def stray_edits(package: Path) -> list[str]:
    """Graph edits outside the files of the table."""
    return [
        edit
        for module in modules(package)
        if not any(fnmatch(module.name, pattern) for pattern in MAY_EDIT)
        for edit in edits(module)
    ]


def idle_permissions(package: Path) -> list[str]:
    """Lines of the table whose part of the package exists, but edits nothing."""
    idle = []
    for pattern in MAY_EDIT:
        found = list(package.glob(pattern))
        stage = package / pattern.split("/", maxsplit=1)[0]
        started = any(path.name != "__init__.py" for path in stage.rglob("*.py"))
        if started and not any(edits(Module(package, path)) for path in found):
            idle.append(pattern)
    return idle


def test_only_the_named_files_edit_graphs() -> None:
    assert stray_edits(PACKAGE) == []


def test_every_permission_is_used() -> None:
    assert idle_permissions(PACKAGE) == []


@pytest.mark.parametrize(
    "statement",
    [
        "graph.call_function(op, (x,))",
        "node.graph.erase_node(node)",
        "node.replace_all_uses_with(other)",
        "node.args = (x,)",
        "first.args, second.args = (), ()",
        "self.node.kwargs = {}",
        "node.target = op",
        "setattr(node, 'args', ())",
        "gm.graph.eliminate_dead_code()",
        "del node.args",
    ],
)
def test_a_stray_edit_is_found(tmp_path: Path, statement: str) -> None:
    package = write_tree(tmp_path, {"optimize/fuse.py": f"def f():\n    {statement}\n"})

    assert [edit.split(": ")[0] for edit in stray_edits(package)][:1] == ["optimize/fuse.py:2"]


@pytest.mark.parametrize(
    "statement", ["rw.erase_node(node)", "self._rw.output(x)", "self.args = ()", "x = node.args"]
)
def test_what_is_no_edit_is_not_found(tmp_path: Path, statement: str) -> None:
    package = write_tree(tmp_path, {"optimize/fuse.py": f"def f(self):\n    {statement}\n"})

    assert stray_edits(package) == []


def test_an_idle_permission_is_found(tmp_path: Path) -> None:
    package = write_tree(
        tmp_path,
        {
            "rewrite/rewriter.py": "graph.erase_node(x)",
            "rewrite/transaction.py": "graph.erase_node(x)",
            "capture/__init__.py": "",
            "backends/compile.py": "",
        },
    )

    assert idle_permissions(package) == ["backends/*.py"]
