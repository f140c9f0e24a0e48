"""Private names of torch are touched in ``_*_api.py`` files only, at most one per stage."""

from __future__ import annotations

import ast
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, Module, modules, write_tree

# Types that public functions of torch take and return, but that have no public name.
TYPES_ONLY = ("torch._ops", "torch.utils._pytree")
# What a node calls is known by `isinstance` alone, and its class has no public name.
ALWAYS = ("torch._ops.OpOverload",)


def is_private(dotted: str) -> bool:
    """Whether a part of the name is private. Below ``torch.ops`` names belong to operators."""
    parts = dotted.split(".")
    if parts[0] != "torch" or parts[:2] == ["torch", "ops"]:
        return False
    return any(part.startswith("_") and not part.endswith("__") for part in parts)


class PrivateNames(ast.NodeVisitor):
    """Collects private names of torch, through import aliases, that code uses at run time."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.found: list[str] = []
        self._alias: dict[str, str] = {}
        self._typing = False

    def _see(self, node: ast.AST, dotted: str) -> None:
        allowed = ALWAYS + (TYPES_ONLY if self._typing else ())
        if is_private(dotted) and not any(f"{dotted}.".startswith(f"{a}.") for a in allowed):
            self.found.append(self.module.at(node, dotted))

    def _in_typing(self, nodes: list[ast.stmt] | list[ast.expr]) -> None:
        before, self._typing = self._typing, True
        for node in nodes:
            self.visit(node)
        self._typing = before

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            self._in_typing(node.body)
            for other in node.orelse:
                self.visit(other)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for name in node.names:
            self._see(node, name.name)
            first = name.name.split(".")[0]
            self._alias[name.asname or first] = name.name if name.asname else first

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for name in node.names:
            dotted = f"{node.module}.{name.name}"
            if node.module not in TYPES_ONLY:
                self._see(node, dotted)
            self._alias[name.asname or name.name] = dotted

    def visit_Name(self, node: ast.Name) -> None:
        dotted = self._alias.get(node.id, "")
        if dotted.rpartition(".")[0] in TYPES_ONLY:
            self._see(node, dotted)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        parts: list[str] = []
        value: ast.expr = node
        while isinstance(value, ast.Attribute):
            parts.append(value.attr)
            value = value.value
        if isinstance(value, ast.Name) and value.id in self._alias:
            self._see(node, ".".join([self._alias[value.id], *reversed(parts)]))
        else:
            self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._in_typing([node.annotation])
        self.visit(node.target)
        if node.value is not None:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        if node.annotation is not None:
            self._in_typing([node.annotation])

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in (node.args, *node.decorator_list, *node.body):
            self.visit(part)
        if node.returns is not None:
            self._in_typing([node.returns])


def is_api_file(module: Module) -> bool:
    """Whether the file is one where private names may be used."""
    return fnmatch(module.path.name, "_*_api.py")


def private_names(package: Path) -> list[str]:
    """Uses of private names outside the files that may."""
    found = []
    for module in modules(package):
        if not is_api_file(module):
            visitor = PrivateNames(module)
            visitor.visit(module.tree)
            found += visitor.found
    return found


def crowded_stages(package: Path) -> list[str]:
    """Stages with more than one such file."""
    counts = Counter(module.parts[0] for module in modules(package) if is_api_file(module))
    return [stage for stage, count in counts.items() if count > 1]


def test_private_names_stay_in_api_files() -> None:
    assert private_names(PACKAGE) == []


def test_a_room_has_at_most_one_api_file() -> None:
    assert crowded_stages(PACKAGE) == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch import _inductor", "torch._inductor"),
        (
            "from torch._ops import HigherOrder\nisinstance(x, HigherOrder)",
            "torch._ops.HigherOrder",
        ),
        ("from torch._subclasses.fake_tensor import F", "torch._subclasses.fake_tensor.F"),
        ("import torch\ntorch._C._x()", "torch._C._x"),
        ("import torch as t\nt._guards.tracing", "torch._guards.tracing"),
        ("import torch\nisinstance(x, torch._ops.HigherOrder)", "torch._ops.HigherOrder"),
        ("from torch.utils import _pytree", "torch.utils._pytree"),
        ("if TYPE_CHECKING:\n    from torch._dynamo import X", "torch._dynamo.X"),
        ("def f():\n    import torch._export", "torch._export"),
    ],
)
def test_a_private_name_is_found(tmp_path: Path, text: str, name: str) -> None:
    package = write_tree(tmp_path, {"optimize/fuse.py": text})

    assert [found.split(": ")[1] for found in private_names(package)] == [name]


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.ops.aten._int_mm.default",
        "import torch\ntorch.__version__",
        "from torch._ops import OpOverload\nisinstance(x, OpOverload)",
        "if TYPE_CHECKING:\n    from torch._ops import OpOverload",
        "import torch\ndef f(x: torch._ops.OpOverload) -> torch._ops.OpOverload: ...",
        "from torch._ops import OpOverloadPacket\ndef f(x: OpOverloadPacket) -> None: ...",
        "import torch\nx: torch._ops.OpOverload = torch.ops.aten.mm.default",
    ],
)
def test_a_public_name_or_a_type_is_not_found(tmp_path: Path, text: str) -> None:
    assert private_names(write_tree(tmp_path, {"optimize/fuse.py": text})) == []


def test_an_api_file_may_and_a_second_one_is_found(tmp_path: Path) -> None:
    package = write_tree(
        tmp_path,
        {
            "lower/_one_api.py": "import torch._C",
            "lower/sub/_two_api.py": "",
            "capture/_three_api.py": "",
        },
    )

    assert private_names(package) == []
    assert crowded_stages(package) == ["lower"]
