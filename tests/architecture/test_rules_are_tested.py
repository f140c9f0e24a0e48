"""Every rule has a mirrored test file with a golden, a refusal and a numeric test.

What counts is the assertion: a golden test shows a text, a refusal names its ``MissCode``.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.architecture.source import PACKAGE, ROOT, Module, modules, write_tree
from tests.architecture.test_assertions import names_code, shows_text

RULE_STAGES = ("normalize", "optimize", "lower")


class RuleClass(NamedTuple):
    """A concrete subclass of ``Rule``."""

    module: Module
    node: ast.ClassDef

    @property
    def rule_name(self) -> str:
        """The ``name`` that the class body gives it, or the class name."""
        for statement in self.node.body:
            match statement:
                case (
                    ast.Assign(
                        targets=[ast.Name(id="name")], value=ast.Constant(value=str() as name)
                    )
                    | ast.AnnAssign(
                        target=ast.Name(id="name"), value=ast.Constant(value=str() as name)
                    )
                ):
                    return name
                case _:
                    pass
        return self.node.name


def base_names(node: ast.ClassDef, aliases: dict[str, str]) -> set[str]:
    """Names of the bases, as they are called where they are defined."""
    names = set()
    for base in node.bases:
        plain = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(plain, ast.Attribute):
            names.add(plain.attr)
        elif isinstance(plain, ast.Name):
            names.add(aliases.get(plain.id, plain.id))
    return names


def import_aliases(tree: ast.Module) -> dict[str, str]:
    """``{"R": "Rule"}`` for ``from ... import Rule as R``."""
    return {
        alias.asname: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }


def rules(package: Path) -> list[RuleClass]:
    """Concrete rules of the stages, found through any number of abstract bases."""
    classes: list[tuple[RuleClass, set[str]]] = []
    for module in modules(package):
        aliases = import_aliases(module.tree)
        classes += [
            (RuleClass(module, node), base_names(node, aliases))
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ClassDef)
        ]
    derived = {"Rule"}
    while more := {c.node.name for c, bases in classes if bases & derived} - derived:
        derived |= more
    return [
        c
        for c, bases in classes
        if bases & derived and "ABC" not in bases and c.module.parts[0] in RULE_STAGES
    ]


def is_numeric(decorated: ast.FunctionDef | ast.ClassDef) -> bool:
    """Whether ``@pytest.mark.numeric`` stands above it."""
    return any(
        ast.unparse(mark).startswith("pytest.mark.numeric") for mark in decorated.decorator_list
    )


def families(tree: ast.Module) -> set[str]:
    """Which of the three families the tests of a file belong to."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) if name.startswith("test_"):
                golden = name.startswith("test_golden") and shows_text(node)
                refuses = name.startswith("test_refuses") and names_code(node)
                found |= {"golden"} if golden else set()
                found |= {"refuses"} if refuses else set()
                found |= {"numeric"} if is_numeric(node) else set()
            case ast.ClassDef() if is_numeric(node):
                found.add("numeric")
            case ast.Assign(targets=[ast.Name(id="pytestmark")]) if "mark.numeric" in ast.unparse(
                node
            ):
                found.add("numeric")
    return found


def mirrored(rule: RuleClass, tests: Path) -> list[Path]:
    """Where the tests of a rule may be: the same folders, or flat in the folder of the stage."""
    *folders, stem = rule.module.parts
    file = f"test_{stem.lstrip('_')}.py"
    return [tests.joinpath(*folders, file), tests / folders[0] / file]


def untested(package: Path, tests: Path) -> list[str]:
    """What the rules of ``package`` lack in ``tests``."""
    missing = []
    for rule in rules(package):
        places = mirrored(rule, tests)
        test = next((place for place in places if place.is_file()), None)
        if test is None:
            shown = places[0].relative_to(tests.parent)
            missing.append(rule.module.at(rule.node, f"{rule.node.name} has no {shown}"))
            continue
        text = test.read_text()
        lacks = {"golden", "refuses", "numeric"} - families(ast.parse(text))
        if rule.node.name not in text and rule.rule_name not in text:
            lacks.add("mention")
        missing += [
            rule.module.at(rule.node, f"{rule.node.name} has no {family} test in {test.name}")
            for family in sorted(lacks)
        ]
    return missing


def test_every_rule_has_its_three_tests() -> None:
    assert untested(PACKAGE, ROOT / "tests") == []


def test_the_rules_of_the_optimizer_are_found() -> None:
    stage = PACKAGE / "optimize"
    started = any(path.name != "__init__.py" for path in stage.rglob("*.py"))

    assert not started or any(rule.module.parts[0] == "optimize" for rule in rules(PACKAGE))


RULE = """\
from qfuse.rewrite.rule import Rule as Base

class FuseThings(Base[Site]):
    name = "fuse-things"
"""
GOLDEN = "def test_golden_of_it(): assert_expected_inline(run(FuseThings), '%x')\n"
REFUSES = "def test_refuses_floats(): assert miss(x).code is MissCode.DTYPE\n"
NUMERIC = "@pytest.mark.numeric\ndef test_values(): ...\n"


@pytest.mark.parametrize(
    ("tests", "complaints"),
    [
        ({}, ["FuseThings has no tests/optimize/test_fuse_things.py"]),
        ({"optimize/test_fuse_things.py": GOLDEN + REFUSES + NUMERIC}, []),
        (
            {"optimize/test_fuse_things.py": REFUSES + NUMERIC + "# FuseThings"},
            ["FuseThings has no golden test in test_fuse_things.py"],
        ),
        (
            {"optimize/test_fuse_things.py": GOLDEN + NUMERIC},
            ["FuseThings has no refuses test in test_fuse_things.py"],
        ),
        (
            {"optimize/test_fuse_things.py": GOLDEN + REFUSES},
            ["FuseThings has no numeric test in test_fuse_things.py"],
        ),
        (
            {
                "optimize/test_fuse_things.py": "def test_golden(): assert f(FuseThings) == 1\n"
                "def test_refuses(): assert not f(FuseThings)\n" + NUMERIC
            },
            [
                "FuseThings has no golden test in test_fuse_things.py",
                "FuseThings has no refuses test in test_fuse_things.py",
            ],
        ),
        (
            {
                "optimize/test_fuse_things.py": GOLDEN.replace("FuseThings", "x")
                + REFUSES
                + NUMERIC,
                "lower/test_fuse_things.py": GOLDEN,
            },
            ["FuseThings has no mention test in test_fuse_things.py"],
        ),
    ],
)
def test_a_missing_test_is_found(
    tmp_path: Path, tests: dict[str, str], complaints: list[str]
) -> None:
    package = write_tree(tmp_path / "qfuse", {"optimize/fuse_things.py": RULE})
    folder = write_tree(tmp_path / "tests", tests)

    found = [complaint.split(": ", maxsplit=1)[1] for complaint in untested(package, folder)]

    assert found == complaints


def test_rules_are_found_through_abstract_bases(tmp_path: Path) -> None:
    package = write_tree(
        tmp_path,
        {
            "lower/base.py": "class LowerOne(Rule[Site], ABC): ...",
            "lower/conv.py": "import qfuse.lower.base as b\nclass LowerConv(b.LowerOne): ...",
            "lower/other.py": "class Table: ...",
            "rewrite/pass_.py": "class NotInARoom(Rule): ...",
        },
    )

    assert [rule.node.name for rule in rules(package)] == ["LowerConv"]
