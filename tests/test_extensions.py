"""Entry points: what packages add is found, and what is wrong with one names it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoints
from pathlib import Path
from typing import Any

import pytest
import torch

import qfuse
from qfuse.backends import Backend, chosen_backends
from qfuse.extensions import (
    Group,
    check_unique,
    extension_names,
    list_extensions,
    load_extensions,
)
from qfuse.ir.errors import ExtensionError, OptionsError
from qfuse.ir.ops import library as ops
from qfuse.ir.refusal import Refusal
from qfuse.kernels import KernelLibrary
from qfuse.lower.kernels.installed import installed_kernels
from qfuse.lower.kernels.registry import all_kernels
from qfuse.normalize.builtin import BUILTIN
from qfuse.normalize.importers.dialect import Dialect, rules_of
from qfuse.optimize import check_rule_names, installed_rules
from qfuse.options import BuiltinBackend
from qfuse.pipeline import Extensions
from qfuse.rewrite.prelude import Node, aten
from qfuse.rewrite.scheduled import Phase, ScheduledRules
from tests.support.toy_rules import DoubleNegation, NegToMul

NONE = KernelLibrary(available=False, reason="not needed here")
MODULE = """
from qfuse.backends import Backend
from qfuse.ir.refusal import Refusal
from qfuse.rewrite.prelude import aten
from qfuse.rewrite.scheduled import Phase, ScheduledRules
from tests.support.toy_rules import DoubleNegation

class Idle(Backend):
    name = "idle"
    supported_ops = ()
    def is_legal(self, node):
        return Refusal("never")
    def implement(self, node):
        raise NotImplementedError

idle = Idle()
rules = ScheduledRules((DoubleNegation,), after=Phase.MOVE)

class Copy:
    name = "qfuse.linear_w8a8"
    covers = ()
    supported = accepts = emit = None

class Own(Copy):
    name = "own"

def copies(): return [Copy()]
def owned(): return [Own()]
def odd(): return [3]
def none(): return None
def fails(): raise RuntimeError("no tiles")
number = 3
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs distributions with metadata; each may have entry points of one group."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "some_extension.py").write_text(MODULE)
    (tmp_path / "broken_extension.py").write_text("import no_such_module")

    def done(name: str, group: str, *points: str) -> None:
        info = tmp_path / f"{name}-1.2.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n" + "\n".join(points) + "\n")

    yield done
    for module in ("some_extension", "broken_extension"):
        sys.modules.pop(module, None)


Install = Callable[..., None]


def test_a_package_that_is_installed_later_is_found(install: Install) -> None:
    before = extension_names(Group.RULES)
    install("one", "qfuse.rules", "one = some_extension:rules")
    assert extension_names(Group.RULES) == tuple(sorted((*before, "one")))
    install("two", "qfuse.rules", "two = some_extension:rules")
    assert extension_names(Group.RULES) == tuple(sorted((*before, "one", "two")))


def test_the_metadata_of_packages_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []

    def read(group: str) -> EntryPoints:
        reads.append(group)
        return EntryPoints(())

    monkeypatch.setattr("qfuse.extensions.entry_points", read)
    monkeypatch.setattr(sys, "path", [*sys.path, "no such folder"])
    for _ in range(3):
        assert extension_names(Group.RULES) == ()
    assert reads == ["qfuse.rules"]


def test_rules_kernels_and_backends_are_found(install: Install) -> None:
    install("one", "qfuse.rules", "one = some_extension:rules")
    install("two", "qfuse.kernels", "two = some_extension:owned")
    install("three", "qfuse.backends", "idle = some_extension:idle")
    (backend,) = chosen_backends("idle")
    found = Extensions.installed(NONE, [backend])

    assert [scheduled.after for scheduled in found.rules] == [Phase.MOVE]
    assert found.rule_names == {"double-negation"}
    assert [kernel.name for make in found.kernels for kernel in make()] == ["own"]
    assert found.backends == (backend,)
    assert qfuse.Options(backend="idle").backend == "idle"


@pytest.mark.parametrize(
    ("group", "point", "load", "complaint"),
    [
        (
            "rules",
            "x = broken_extension:rules",
            installed_rules,
            "cannot be loaded: ModuleNotFound",
        ),
        ("rules", "x = some_extension:number", installed_rules, "is 3, not a qfuse.rewrite.sch"),
        (
            "kernels",
            "x = some_extension:number",
            lambda: installed_kernels(()),
            "is 3, not a function",
        ),
        ("kernels", "x = some_extension:none", lambda: installed_kernels(()), "returned None"),
        (
            "kernels",
            "x = some_extension:fails",
            lambda: installed_kernels(()),
            r"failed: RuntimeError\('no tiles'\)",
        ),
        ("kernels", "x = some_extension:odd", lambda: installed_kernels(()), "which has no 'name'"),
        (
            "backends",
            "x = some_extension:idle",
            lambda: chosen_backends("x"),
            "the entry point 'x'",
        ),
        ("backends", "x = some_extension:rules", lambda: chosen_backends("x"), "not a qfuse.backe"),
        ("backends", "x = broken_extension:x", lambda: chosen_backends("x"), "no_such_module"),
    ],
)
def test_what_is_wrong_with_a_package_names_it(
    install: Install, group: str, point: str, load: Callable[[], Any], complaint: str
) -> None:
    install("acme", f"qfuse.{group}", point)

    with pytest.raises(ExtensionError, match=complaint) as caught:
        load()
    assert "acme" in str(caught.value)


@pytest.mark.parametrize("group", Group)
def test_two_packages_with_one_name_are_an_error_that_names_both(
    install: Install, group: Group
) -> None:
    install("acme", group, "same = some_extension:number")
    install("zenith", group, "same = some_extension:rules")

    with pytest.raises(ExtensionError, match=r"acme 1.2 and one of zenith 1.2"):
        load_extensions(group, object)


def test_a_dialect_that_clashes_names_its_distribution(install: Install, tmp_path: Path) -> None:
    (tmp_path / "some_extension.py").write_text(
        "from qfuse.normalize.importers.dialect import Dialect\n"
        "from qfuse.normalize.aten.cast_rules import CASTS\n"
        "dialect = Dialect('other', CASTS.rules)\n"
    )
    install("acme", "qfuse.dialects", "other = some_extension:dialect")

    with pytest.raises(ExtensionError, match=r"in 'casts' of qfuse and in 'other' of acme 1.2"):
        qfuse.explain(
            torch.nn.Linear(4, 4).eval(), (torch.ones(1, 4),), options={"own_kernels": False}
        )


def test_a_kernel_with_the_name_of_another_is_an_error(install: Install) -> None:
    install("acme", "qfuse.kernels", "x = some_extension:copies")

    with pytest.raises(ExtensionError, match=r"'qfuse.linear_w8a8': one of qfuse and one of acme"):
        installed_kernels(all_kernels(NONE))


def test_a_backend_with_a_built_in_name_is_an_error(install: Install) -> None:
    install("acme", "qfuse.backends", "eager = some_extension:idle")

    with pytest.raises(ExtensionError, match=r"'eager': one of qfuse and one of acme 1.2"):
        chosen_backends(BuiltinBackend.EAGER)


def test_a_rule_with_the_name_of_another_is_an_error() -> None:
    class FuseLinear(DoubleNegation):
        name = "fuse-linear"

    from qfuse.extensions import Extension  # noqa: PLC0415

    scheduled = Extension("x", ScheduledRules((FuseLinear,), after=Phase.FOLD), "acme 1.2")
    with pytest.raises(ExtensionError, match=r"'fuse-linear': one of qfuse and one of acme 1.2"):
        check_rule_names([scheduled])


@pytest.mark.parametrize(
    "place",
    [
        {},
        {"after": Phase.FUSE, "group": Phase.FUSE},
        {"group": Phase.MERGE},
    ],
)
def test_rules_have_one_place(place: dict[str, Phase]) -> None:
    with pytest.raises(ExtensionError, match="is not a place of rules"):
        ScheduledRules((NegToMul,), **place)


def test_rules_are_classes_that_declare_what_they_must() -> None:
    class Nameless(NegToMul):
        anchors = ("aten::neg",)  # type: ignore[assignment]

    with pytest.raises(ExtensionError, match="is not a class of rules"):
        ScheduledRules((NegToMul(),), after=Phase.FOLD)  # type: ignore[arg-type]
    with pytest.raises(ExtensionError, match="is not an OpOverload"):
        ScheduledRules((Nameless,), after=Phase.FOLD)


class Idle(Backend):
    """Claims nothing."""

    name = "idle"
    supported_ops = (ops.quantize, aten.relu.default)

    def is_legal(self, node: Node) -> Refusal:
        """Refuse everything."""
        del node
        return Refusal("never")

    def implement(self, node: Node) -> Callable[..., Any]:
        """Not called."""
        raise NotImplementedError


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("fast", "backend='fast' is not one of 'auto', 'aoti', 'eager'"),
        (3, "backend=3 is not a backend"),
        ((), "is not a backend"),
        (("eager", Idle()), "a tuple of backends of other packages"),
    ],
)
def test_what_is_no_backend_is_an_option_error(value: object, complaint: str) -> None:
    with pytest.raises(OptionsError, match=complaint.replace("(", r"\(")):
        qfuse.Options(backend=value)


def test_a_backend_is_chosen_once() -> None:
    with pytest.raises(OptionsError, match="name each backend once"):
        chosen_backends((Idle(), Idle()))


def test_names_are_listed_without_an_import(install: Install) -> None:
    install("acme", "qfuse.backends", "b = broken_extension:b", "a = broken_extension:a")

    assert extension_names(Group.BACKENDS) == ("a", "b")
    assert "broken_extension" not in sys.modules


@pytest.mark.parametrize(
    ("rules", "complaint"),
    [
        (lambda: int("x"), "the dialect 'mine' failed: ValueError"),
        ([DoubleNegation()], "the dialect 'mine' failed: TypeError"),
        (lambda: None, "the dialect 'mine' returned None"),
    ],
)
def test_a_dialect_that_gives_no_rules_is_named(rules: Any, complaint: str) -> None:
    with pytest.raises(ExtensionError, match=complaint):
        rules_of([Dialect("mine", rules)])


def test_a_clash_with_a_dialect_of_qfuse_says_so() -> None:
    mine = Dialect("aten", list, origin="acme 1.2")
    with pytest.raises(ExtensionError, match=r"in 'aten' of qfuse and in 'aten' of acme 1.2"):
        rules_of([*BUILTIN, mine])


def test_a_backend_that_gives_no_rules_is_named() -> None:
    class Ruleless(Idle):
        def rules(self) -> Any:
            return None

    with pytest.raises(ExtensionError, match="the backend 'idle' returned None"):
        Extensions.installed(NONE, [Ruleless()])


def test_unique_names_pass() -> None:
    check_unique({"a": "qfuse"}, [("b", "acme"), ("c", "acme")], "rule")
    with pytest.raises(ExtensionError, match="acme has two rules 'b'"):
        check_unique({}, [("b", "acme"), ("b", "acme")], "rule")


def test_what_is_installed_is_listed_with_its_package(install: Install) -> None:
    install("one", "qfuse.rules", "mine = some_extension:rules")
    install("two", "qfuse.dialects", "broken = broken_extension:dialect")
    found = {one.name: one for one in list_extensions()}

    mine, broken = found["mine"], found["broken"]
    assert (mine.what, mine.origin, mine.problem) == ("set of rules", "one 1.2", "")
    assert mine.value == "some_extension:rules"
    assert (broken.what, broken.origin) == ("dialect", "two 1.2")
    assert "no_such_module" in broken.problem
