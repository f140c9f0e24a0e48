"""House rules that the linters do not know, and a few that must not be silenced with a comment."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, ROOT, modules, write_tree

MAX_LINES = 400
MAX_FILES = 24
MAY_PRINT = ("cli", "report")
MAY_CATCH_ALL = "rewrite/driver.py"
CATCH_ALL = {"BaseException", "Exception"}

CODE = {".cpp", ".h", ".py"}
TEXT = {*CODE, "", ".cfg", ".html", ".j2", ".json", ".md", ".toml", ".txt", ".yaml", ".yml"}
SKIPPED = re.compile(r"(^|/)(\.git|\.venv|build|dist|__pycache__|\.\w+_cache|\.hypothesis)(/|$)")

LEFT_OVER = re.compile(r"\b(TODO|FIXME|XXX)\b")
# A path of somebody's machine: the home of a user, or the folders that containers are fond of.
MACHINE_PATH = re.compile(r"(?<![\w.$}>-])/(?:root|work|workspace|opt/\w+|home/\w+|Users/\w+)\b")

# The zoo has models and recipes of the same interface; what it does is not what the stages do.
# `qfuse.load` loads a model, `qfuse.kernels.load` the kernels.
SHARED_NAMES = {"build", "describe", "load", "names", "optimize", "quantize"}


def repository_files(root: Path) -> list[Path]:
    """The text files that git tracks, or all of them where there is no git."""
    listing = subprocess.run(
        ["git", "ls-files"], cwd=root, capture_output=True, text=True, check=False
    )
    tracked = [root / name for name in listing.stdout.splitlines()]
    return [
        path
        for path in tracked or sorted(root.rglob("*"))
        if path.is_file()
        and path.suffix in TEXT
        and not SKIPPED.search(path.relative_to(root).as_posix())
    ]


def lines_matching(pattern: re.Pattern[str], root: Path) -> list[str]:
    """``file:line: match`` for every match; this file spells the patterns and is left out."""
    return [
        f"{path.relative_to(root).as_posix()}:{number}: {match[0]}"
        for path in repository_files(root)
        if path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if (match := pattern.search(line))
    ]


def long_files(root: Path) -> list[str]:
    """Code files that want to be two."""
    counts = {
        path: len(path.read_text().splitlines())
        for path in repository_files(root)
        if path.suffix in CODE
    }
    return [
        f"{path.relative_to(root).as_posix()}: {count} lines"
        for path, count in counts.items()
        if count >= MAX_LINES
    ]


def crowded_folders(root: Path) -> list[str]:
    """Folders that hold more code files than a newcomer looks through."""
    counts = Counter(
        path.parent.relative_to(root).as_posix()
        for path in repository_files(root)
        if path.suffix in CODE
    )
    return [f"{folder}: {count} files" for folder, count in counts.items() if count > MAX_FILES]


def repeated_names(package: Path, kind: type[ast.ClassDef | ast.FunctionDef]) -> list[str]:
    """Public names that several modules define: two meanings, or one fact in two places."""
    places: dict[str, list[str]] = {}
    for module in modules(package):
        for node in module.tree.body:
            # A pass of the catalogue has the name of the rule that it runs.
            if isinstance(node, kind) and module.name != "passes/catalogue.py":
                places.setdefault(node.name, []).append(module.name)
    return [
        f"{name}: {', '.join(found)}"
        for name, found in places.items()
        if len(found) > 1 and not name.startswith("_") and name not in SHARED_NAMES
    ]


def prints(package: Path) -> list[str]:
    """Calls of ``print`` outside the parts that talk to a terminal."""
    return [
        module.at(node, "print")
        for module in modules(package)
        if not module.parts or module.parts[0] not in MAY_PRINT
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]


def catches_all(handler: ast.ExceptHandler) -> bool:
    """Whether a handler swallows what nobody thought of; cleaning up and raising on is fine."""
    if isinstance(handler.body[-1], ast.Raise) and handler.body[-1].exc is None:
        return False
    if handler.type is None:
        return True
    return any(isinstance(n, ast.Name) and n.id in CATCH_ALL for n in ast.walk(handler.type))


def broad_handlers(package: Path) -> list[str]:
    """Handlers of every exception, outside the driver."""
    return [
        module.at(node, "catches everything")
        for module in modules(package)
        if module.name != MAY_CATCH_ALL
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ExceptHandler) and catches_all(node)
    ]


def test_nothing_is_left_over() -> None:
    assert lines_matching(LEFT_OVER, ROOT) == []


def test_no_paths_of_a_machine() -> None:
    assert lines_matching(MACHINE_PATH, ROOT) == []


def test_files_stay_short() -> None:
    assert long_files(ROOT) == []


def test_folders_stay_small() -> None:
    assert crowded_folders(ROOT) == []


def test_a_class_name_has_one_meaning() -> None:
    assert repeated_names(PACKAGE, ast.ClassDef) == []


def test_a_function_name_has_one_meaning() -> None:
    assert repeated_names(PACKAGE, ast.FunctionDef) == []


def test_only_the_talking_parts_print() -> None:
    assert prints(PACKAGE) == []


def test_only_the_driver_catches_everything() -> None:
    assert broad_handlers(PACKAGE) == []


def test_the_repository_is_read() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in repository_files(ROOT)}

    assert {"Makefile", ".ci/run", "pyproject.toml", "src/qfuse/__init__.py"} <= names


def test_left_overs_are_found(tmp_path: Path) -> None:
    write_tree(
        tmp_path, {"docs/a.md": "fine\nTODO: more", "src/k.cpp": "// FIXME", "b.py": "# todos"}
    )

    assert lines_matching(LEFT_OVER, tmp_path) == ["docs/a.md:2: TODO", "src/k.cpp:1: FIXME"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("see /root/notes", True),
        ('open("/home/ann/x")', True),
        ("cp x /opt/tools/y", True),
        ("https://example.org/work/a", False),
        ("src/root/x", False),
        ("$HOME/work/x", False),
        ("work/root", False),
    ],
)
def test_paths_of_a_machine_are_found(tmp_path: Path, line: str, found: bool) -> None:
    write_tree(tmp_path, {"a.md": line})

    assert bool(lines_matching(MACHINE_PATH, tmp_path)) is found


def test_long_files_are_found(tmp_path: Path) -> None:
    write_tree(tmp_path, {"a.py": "x\n" * 399, "b.cpp": "x\n" * 400, "c.md": "x\n" * 900})

    assert long_files(tmp_path) == ["b.cpp: 400 lines"]


def test_crowded_folders_are_found(tmp_path: Path) -> None:
    many = {f"a/m{number}.py": "" for number in range(MAX_FILES + 1)}
    write_tree(tmp_path, {**many, "b/m.py": ""})

    assert crowded_folders(tmp_path) == [f"a: {MAX_FILES + 1} files"]


@pytest.mark.parametrize(
    ("text", "kind", "found"),
    [
        ("class One: ...\nclass _Two: ...", ast.ClassDef, ["One: a.py, b.py"]),
        ("def one(): ...\ndef _two(): ...", ast.FunctionDef, ["one: a.py, b.py"]),
        ("def names(): ...", ast.FunctionDef, []),
    ],
)
def test_repeated_names_are_found(
    tmp_path: Path, text: str, kind: type[ast.ClassDef | ast.FunctionDef], found: list[str]
) -> None:
    files = dict.fromkeys(("a.py", "b.py", "passes/catalogue.py"), text)

    assert repeated_names(write_tree(tmp_path, files), kind) == found


def test_prints_are_found(tmp_path: Path) -> None:
    package = write_tree(
        tmp_path,
        {"cli/main.py": "print(1)", "report/table.py": "print(1)", "lower/x.py": "print(1)"},
    )

    assert prints(package) == ["lower/x.py:1: print"]


@pytest.mark.parametrize(
    ("handler", "found"),
    [
        ("except: pass", True),
        ("except Exception: pass", True),
        ("except (ValueError, BaseException) as e: pass", True),
        ("except Exception as e: raise ValueError from e", True),
        ("except BaseException: raise", False),
        ("except ValueError: pass", False),
    ],
)
def test_broad_handlers_are_found(tmp_path: Path, handler: str, found: bool) -> None:
    text = f"try:\n    f()\n{handler}\n"
    package = write_tree(tmp_path, {"rewrite/driver.py": text, "rewrite/rule.py": text})

    assert broad_handlers(package) == ["rewrite/rule.py:3: catches everything"] * found
