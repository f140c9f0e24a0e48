"""Source dialects, and the entry point by which third parties add theirs.

A dialect is a set of rules that turn ops of some namespaces into canonical ones. A package adds
a dialect with an entry point::

    [project.entry-points."qfuse.dialects"]
    mine = "my_package:dialect"

where ``my_package.dialect`` is a :class:`Dialect`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from qfuse.extensions import OWN, Group, load_extensions
from qfuse.ir.errors import ExtensionError
from qfuse.ir.foreign import list_foreign
from qfuse.rewrite.declared import check_declared
from qfuse.rewrite.prelude import OpOverload, Rule

_NAMESPACES = {
    **dict.fromkeys(("aten", "prims", "quantized"), "torch"),
    "qfuse": "qfuse",
}
"""The namespaces that no dialect owns, each with its owner."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One source of quantized graphs.

    Attributes:
        name: Unique name.
        rules: Returns the rules; called once per graph.
        namespaces: Namespaces of the ops that it owns. Those of its ops that remain in a graph are
            named in the report.
        limits: Why an op, by the name ``namespace::op``, has no canonical form: for the report.
        spell: Returns the inverse rules, from canonical ops to ops of the dialect; its argument
            maps the name of each source node to the op that it called. For :mod:`qfuse.passes`;
            ``None`` if the dialect has no such rules.
        origin: Name and version of the distribution that it is from; "qfuse" for the built-in ones,
            "" if it was not found by an entry point.
    """

    name: str
    rules: Callable[[], Sequence[Rule[Any]]]
    namespaces: frozenset[str] = frozenset()
    limits: Mapping[str, str] = field(default_factory=dict)
    spell: Callable[[Mapping[str, OpOverload]], Sequence[Rule[Any]]] | None = None
    origin: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.name!r} of {self.origin}" if self.origin else repr(self.name)


def discover() -> tuple[Dialect, ...]:
    """Load the dialects of installed packages, in the order of the names of their entry points.

    Raises:
        ExtensionError: An entry point cannot be loaded or is not a dialect, or two have one name.
    """
    found = load_extensions(Group.DIALECTS, Dialect)
    return tuple(replace(e.value, origin=e.origin) for e in found)


def rules_of(dialects: Sequence[Dialect]) -> list[Rule[Any]]:
    """Return the rules of all dialects, earlier dialects first.

    Raises:
        ExtensionError: A dialect fails to give its rules; two dialects or two rules have one
            name; two dialects own one namespace, or one owns that of torch or of qfuse; something
            is not a rule, or lacks a class attribute, or has anchors that are not op overloads.
    """
    owners: dict[str, str] = {}
    rules: list[Rule[Any]] = []
    _check_namespaces(dialects)
    for dialect in dialects:
        # Options, bans and the report refer to dialects and rules by name.
        _claim(owners, f"dialect {dialect.name}", dialect)
        what = f"the function `rules` of the dialect {dialect}"
        for rule in list_foreign(dialect.rules, what=what, fix="return a list of rules"):
            if not isinstance(rule, Rule):
                raise ExtensionError(
                    f"the dialect {dialect} gives {rule!r}, which is not a rule",
                    fix="give instances of subclasses of qfuse.rewrite.rule.Rule",
                )
            check_declared(rule, f"the dialect {dialect}")
            _claim(owners, f"rule {rule.name}", dialect)
            rules.append(rule)
    return rules


def _check_namespaces(dialects: Sequence[Dialect]) -> None:
    """Check that every namespace has one owner, so that the report names the right dialect."""
    owners = dict(_NAMESPACES)
    # The built-in dialects first: they own what is theirs whatever the order.
    for dialect in sorted(dialects, key=lambda d: d.origin != OWN):
        for namespace in sorted(dialect.namespaces):
            owner = owners.get(namespace)
            if owner is not None:
                raise ExtensionError(
                    f"the dialect {dialect} claims the namespace {namespace!r}, which is that of "
                    f"{owner}",
                    fix="remove it from `namespaces`: rules may match its ops all the same",
                )
            owners[namespace] = f"the dialect {dialect}"


def _claim(owners: dict[str, str], thing: str, dialect: Dialect) -> None:
    if thing in owners:
        raise ExtensionError(
            f"there are two of the name {thing!r}: in {owners[thing]} and in {dialect}",
            fix="rename one of them, or uninstall one of the packages",
        )
    owners[thing] = str(dialect)
