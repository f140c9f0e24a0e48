from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.architecture.source import PACKAGE as PACKAGE_FOLDER
from tests.support.sources.dialects import Source, fired

from qfuse.ir.errors import ExtensionError, VerifyError
from qfuse.ir.graph.stage_graph import RULE_META
from qfuse.ir.stages.verify import verify
from qfuse.normalize import normalize
from qfuse.normalize.aten.cast_rules import CASTS
from qfuse.normalize.aten.qdq.fold_cast_into_quantize import FoldCastIntoQuantize
from qfuse.normalize.builtin import BUILTIN
from qfuse.normalize.importers.dialect import Dialect, discover, rules_of
from qfuse.normalize.importers.pt2e.dialect import DECOMPOSED
from qfuse.normalize.importers.qdq import QdqRule, QdqSite
from qfuse.rewrite.prelude import Node, aten

PACKAGE = """
from qfuse.normalize.importers.dialect import Dialect
from qfuse.normalize.aten.qdq.fold_cast_into_quantize import FoldCastIntoQuantize

class Mine(FoldCastIntoQuantize):
    name = "mine"

dialect = Dialect("mine", lambda: [Mine()], frozenset({"mine"}))
number = 3
def explode():
    raise RuntimeError("boom")
class Broken:
    def __getattr__(self, name):
        raise ValueError("broken " + name)
broken = Broken()
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "some_dialect.py").write_text(PACKAGE)
    (tmp_path / "unparsable_dialect.py").write_text("def (")
    yield tmp_path
    for name in ("some_dialect", "unparsable_dialect"):
        sys.modules.pop(name, None)


def install(site: Path, *points: str) -> None:
    """Install a package whose metadata names entry points."""
    info = site / "some_dialect-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-dialect\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[qfuse.dialects]\n" + "\n".join(points) + "\n")


def test_an_installed_dialect_is_found_and_used(site: Path) -> None:
    install(site, "mine = some_dialect:dialect")

    (found,) = [d for d in discover() if d.name == "mine"]
    assert [rule.name for rule in rules_of([found])] == ["mine"]


def test_normalize_uses_installed_dialects_after_the_built_in_ones(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "mine = some_dialect:dialect")
    # The package gives the function the name of its module.
    monkeypatch.setattr(sys.modules["qfuse.normalize.normalize"], "BUILTIN", (DECOMPOSED,))
    source = Source()
    x = source.b.arg("x", torch.bfloat16, 3, 8)
    wide = source.b.call(torch.ops.aten._to_copy.default, x, dtype=torch.float32)
    op = torch.ops.quantized_decomposed.quantize_per_tensor.default
    program = normalize(source.done(source.b.call(op, wide, 0.1, 0, -128, 127, torch.int8)))

    assert fired(program) == ["normalize-quantize-per-tensor", "mine"]


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("some_dialect:nothing", "cannot be loaded: AttributeError"),
        ("no_such_module:dialect", "cannot be loaded: ModuleNotFoundError"),
        ("unparsable_dialect:dialect", "cannot be loaded: SyntaxError"),
        ("some_dialect:broken.part", "cannot be loaded: ValueError: broken part"),
        ("some_dialect:number", "is 3, not a qfuse.normalize.importers.dialect.Dialect"),
        ("some_dialect:explode", "not a qfuse.normalize.importers.dialect.Dialect"),
    ],
)
def test_a_broken_dialect_is_an_error_that_names_its_package(
    site: Path, target: str, complaint: str
) -> None:
    install(site, f"mine = {target}")

    with pytest.raises(ExtensionError, match=complaint) as caught:
        discover()
    assert f"the dialect 'mine' of some-dialect 1.2 (entry point {target})" in str(caught.value)
    assert "uninstall it" in str(caught.value)


def test_the_order_does_not_depend_on_the_order_of_installation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points = [
        EntryPoint(name, f"qfuse.normalize.{module}", "qfuse.dialects")
        for name, module in (
            ("b", "aten.cast_rules:CASTS"),
            ("a", "importers.pt2e.dialect:DECOMPOSED"),
        )
    ]

    def installed(group: str) -> list[EntryPoint]:
        return [point for point in points if point.group == group]

    monkeypatch.setattr("qfuse.extensions._entry_points", installed)

    assert discover() == (DECOMPOSED, CASTS)


def test_two_dialects_of_one_name_are_an_error() -> None:
    with pytest.raises(ExtensionError, match="two of the name 'dialect casts'"):
        rules_of([CASTS, Dialect("casts", list)])


def test_two_rules_of_one_name_are_an_error() -> None:
    with pytest.raises(ExtensionError, match="in 'casts' and in 'other'"):
        rules_of([CASTS, Dialect("other", CASTS.rules)])


def test_what_is_no_rule_is_an_error() -> None:
    def rules() -> list[Any]:
        return [torch.relu]

    with pytest.raises(ExtensionError, match="which is not a rule"):
        rules_of([Dialect("odd", rules)])


class Named(FoldCastIntoQuantize):
    """A rule that differs from a working one in what a test sets."""

    name = "named"


class Nameless(QdqRule):
    """A rule whose author forgot its name."""

    anchors = (aten.relu.default,)

    def read(self, node: Node) -> QdqSite:
        """Not called."""
        raise AssertionError(node)


class Opless(Nameless):
    """A rule that does not say what it makes."""

    name = "opless"


@pytest.mark.parametrize(("kind", "lacks"), [(Nameless, "name"), (Opless, "op")])
def test_a_rule_that_declares_too_little_is_an_error(kind: type[QdqRule], lacks: str) -> None:
    text = f"the rule {kind.__name__} of the dialect 'odd' has no '{lacks}'"

    with pytest.raises(ExtensionError, match=text):
        rules_of([Dialect("odd", lambda: [kind()])])


@pytest.mark.parametrize(
    ("anchors", "complaint", "fix"),
    [
        ((aten.relu,), "the anchor aten.relu of the rule", "write torch.ops.aten.relu.default"),
        (("aten::relu",), "is not an OpOverload", "write torch.ops.aten.relu.default"),
        (aten.relu.default, "are not a tuple", "write (torch.ops.aten.relu.default,)"),
        ("aten::relu", "are not a tuple", "write (torch.ops.aten.relu.default,)"),
    ],
)
def test_anchors_that_match_nothing_are_an_error(
    monkeypatch: pytest.MonkeyPatch, anchors: object, complaint: str, fix: str
) -> None:
    monkeypatch.setattr(Named, "anchors", anchors)

    with pytest.raises(ExtensionError, match=complaint) as caught:
        rules_of([Dialect("odd", lambda: [Named()])])
    assert "Named of the dialect 'odd'" in str(caught.value)
    assert fix in str(caught.value)


def test_the_rule_that_made_a_broken_node_is_named() -> None:
    source = Source()
    program = source.done(source.b.call(aten.relu.default, source.arg(torch.ones(3))))
    (node,) = program.graph.find_nodes(op="call_function", target=aten.relu.default)
    node.meta[RULE_META] = "acme-dequantize"
    del node.meta["val"]

    with pytest.raises(VerifyError, match="fix the rule acme-dequantize"):
        verify(program)


def test_the_built_in_dialects_agree_on_names() -> None:
    assert len(rules_of(BUILTIN)) == len({rule.name for rule in rules_of(BUILTIN)})


@pytest.mark.slow
def test_dialects_import_no_package_that_they_are_about() -> None:
    probe = (
        "import sys, qfuse.normalize.builtin as b, qfuse.normalize.importers.dialect as d;"
        "d.rules_of(b.BUILTIN);"
        "print([m for m in ('torchao', 'torch.ao.quantization.fx._decomposed')"
        " if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", probe],
        env={**os.environ, "PYTHONPATH": str(PACKAGE_FOLDER.parent)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )

    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("namespace", "owner"),
    [
        ("aten", "torch"),
        ("qfuse", "qfuse"),
        ("torchao", "'torchao-affine' of qfuse"),
        ("npu", "'one'"),
    ],
)
def test_a_namespace_of_another_package_is_an_error(namespace: str, owner: str) -> None:
    owned = Dialect("one", list, frozenset({"npu"}))
    other = Dialect("other", list, frozenset({namespace}), origin="acme 1.2")
    with pytest.raises(ExtensionError, match=f"claims the namespace '{namespace}'") as caught:
        rules_of([owned, other, *BUILTIN])
    assert "'other' of acme 1.2" in str(caught.value)
    assert str(caught.value).split("that of ")[1].startswith((owner, f"the dialect {owner}"))


def test_dialects_with_namespaces_of_their_own() -> None:
    one, two = (Dialect(name, list, frozenset({name})) for name in ("one", "two"))
    assert len(rules_of([*BUILTIN, one, two])) == len(rules_of(BUILTIN))
