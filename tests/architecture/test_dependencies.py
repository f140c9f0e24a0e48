"""What a package imports is what it declares: nothing more, nothing less."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from qfuse.targets import doctor
from tests.architecture.source import PACKAGE, ROOT, Module, modules, write_tree

Declared = dict[str, frozenset[str]]
_BRING = packages_distributions()
BENCH = ROOT / "benchmarks"
# `Tensor.numpy` and `safetensors.torch` import it, without declaring it.
_BY_OTHERS = frozenset({"numpy"})
_SPEC = re.compile(r"[A-Za-z0-9._-]+")


def normalized(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(project: Path) -> Declared:
    """Names of the declared distributions: under "" the dependencies, then the extras."""
    table = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    groups = {"": table["dependencies"], **table.get("optional-dependencies", {})}
    return {
        group: frozenset(normalized(_SPEC.match(spec)[0]) for spec in specs)  # type: ignore[index]
        for group, specs in groups.items()
    }


def distributions(name: str) -> frozenset[str]:
    """The distributions that may bring the top-level module ``name``; itself if none is here."""
    return frozenset(map(normalized, _BRING.get(name, [name])))


def imports(module: Module) -> list[tuple[ast.stmt, str, bool]]:
    """Foreign top-level modules that a file imports, and whether that happens on import."""
    inside = {
        id(node)
        for function in ast.walk(module.tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        else:
            continue
        # Packages beside it are in the same distribution.
        own = {face.parent.name for face in module.package.parent.glob("*/__init__.py")}
        tops = {name.partition(".")[0] for name in names} - {module.package.name} - own
        found += [(node, top, id(node) not in inside) for top in sorted(tops)]
    return [entry for entry in found if entry[1] not in sys.stdlib_module_names]


def undeclared(package: Path, known: Declared) -> list[str]:
    """Imports of what is not declared; an extra may be imported inside a function only."""
    anywhere = frozenset().union(*(names for group, names in known.items() if group != "dev"))
    return [
        module.at(node, f"{top} is not declared" + (" outside the extras" if early else ""))
        for module in modules(package)
        for node, top, early in imports(module)
        if not distributions(top) & (known[""] if early else anywhere)
    ]


def unused(package: Path, known: Declared) -> list[str]:
    """Dependencies that no file needs."""
    used = {
        name
        for module in modules(package)
        for _, top, _ in imports(module)
        for name in distributions(top)
    }
    return sorted(known[""] - used - _BY_OTHERS)


def test_imports_are_declared() -> None:
    assert undeclared(PACKAGE, declared(ROOT)) == []


def test_the_benchmarks_add_what_qfuse_does_not_declare() -> None:
    own, core = declared(BENCH), declared(ROOT)
    known = {"": own[""] | core[""], "peers": own["peers"], "zoo": core["zoo"]}

    assert undeclared(BENCH / "qfuse_bench", known) == []
    assert unused(BENCH / "qfuse_bench", own) == []


def test_dependencies_are_imported() -> None:
    assert unused(PACKAGE, declared(ROOT)) == []


def test_missing_and_needless_dependencies_are_found(tmp_path: Path) -> None:
    project = """
        [project]
        dependencies = ["torch>=2", "typer"]
        optional-dependencies.zoo = ["transformers>=5,<6"]
        optional-dependencies.dev = ["pytest"]
    """
    tree = write_tree(
        tmp_path,
        {
            "pyproject.toml": project,
            "qfuse/a.py": "import json, torch.fx\nfrom click import echo\nfrom qfuse import b",
            "qfuse/b.py": "import transformers\n\ndef f():\n    import transformers, pytest",
        },
    )
    known = declared(tree)

    assert undeclared(tree / "qfuse", known) == [
        "a.py:2: click is not declared outside the extras",
        "b.py:1: transformers is not declared outside the extras",
        "b.py:4: pytest is not declared",
    ]
    assert unused(tree / "qfuse", known) == ["typer"]


def test_every_declared_package_has_a_version_that_is_tested() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    versions = [line.partition("==")[0] for line in lines if not line.startswith("#")]
    assert versions == sorted(versions)

    own = {"qfuse", "qfuse-bench", "torch"}
    installed = {*(declared(ROOT)[""]), *(declared(BENCH)[""])}
    for extra in ("zoo", "docs", "dev"):
        installed |= declared(ROOT)[extra]
    assert installed - own <= set(versions)


def test_the_supported_versions_are_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    readme = (ROOT / "README.md").read_text()
    (low, first), (high, end) = doctor.TORCH_RANGE
    pythons = [text for text in project["classifiers"] if re.search(r"Python :: 3\.\d+", text)]
    oldest, newest = pythons[0].rpartition(" ")[2], pythons[-1].rpartition(" ")[2]

    assert f"torch>={low}.{first},<{high}.{end}" in project["dependencies"]
    assert project["requires-python"] == f">={oldest}"
    supported = f"Linux, Python {oldest} to {newest}, torch {low}.{first} to {high}.{end - 1}"
    assert readme.count(supported) == 2
    (low, first), _ = doctor.TORCHAO_RANGE
    assert f"torchao=={low}.{first}.*" in project["dependencies"]
    assert f"{supported} with torchao {low}.{first}." in readme
