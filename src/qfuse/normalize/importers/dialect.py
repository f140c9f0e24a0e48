"""Source dialects, and the entry point by which third parties add theirs.

A dialect is a set of rules that turn ops of some namespaces into canonical ones. A package adds
a dialect with an entry point::

    [project.entry-points."qfuse.dialects"]
    mine = "my_package:dialect"

where ``my_package.dialect`` is a :class:`Dialect`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from qfuse.ir.errors import USER_CODE_ERRORS, NormalizeError
from qfuse.normalize.importers.declared import check_declared
from qfuse.rewrite.prelude import OpOverload, Rule

ENTRY_POINT_GROUP = "qfuse.dialects"


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
    """

    name: str
    rules: Callable[[], Sequence[Rule[Any]]]
    namespaces: frozenset[str] = frozenset()
    limits: Mapping[str, str] = field(default_factory=dict)
    spell: Callable[[Mapping[str, OpOverload]], Sequence[Rule[Any]]] | None = None


def discover(group: str = ENTRY_POINT_GROUP) -> tuple[Dialect, ...]:
    """Load the dialects of installed packages, in the order of their names.

    Raises:
        NormalizeError: An entry point cannot be loaded or is not a dialect.
    """
    # Sorted, since the order of installation must not decide which rule is tried first.
    points = sorted(entry_points(group=group), key=lambda p: (p.name, p.value))
    return tuple(map(_load, dict.fromkeys(points)))


def _load(point: EntryPoint) -> Dialect:
    package = f" of {point.dist.name} {point.dist.version}" if point.dist else ""
    what = f"the dialect {point.name!r}{package} (entry point {point.value})"
    fix = "repair the package, or uninstall it to go on without it"
    try:
        loaded = point.load()
    except USER_CODE_ERRORS as error:
        raise NormalizeError(
            f"{what} cannot be loaded: {type(error).__name__}: {error}", fix=fix
        ) from error
    if not isinstance(loaded, Dialect):
        raise NormalizeError(
            f"{what} is {loaded!r}, not a qfuse.normalize.importers.dialect.Dialect", fix=fix
        )
    return loaded


def rules_of(dialects: Sequence[Dialect]) -> list[Rule[Any]]:
    """Return the rules of all dialects, earlier dialects first.

    Raises:
        NormalizeError: Two dialects or two rules have one name; something is not a rule, or
            lacks a class attribute, or has anchors that are not op overloads.
    """
    owners: dict[str, str] = {}
    rules: list[Rule[Any]] = []
    for dialect in dialects:
        # Options, bans and the report refer to dialects and rules by name.
        _claim(owners, f"dialect {dialect.name}", dialect.name)
        for rule in dialect.rules():
            if not isinstance(rule, Rule):
                raise NormalizeError(
                    f"the dialect {dialect.name!r} gives {rule!r}, which is not a rule",
                    fix="give instances of subclasses of qfuse.rewrite.rule.Rule",
                )
            check_declared(rule, dialect.name)
            _claim(owners, f"rule {rule.name}", dialect.name)
            rules.append(rule)
    return rules


def _claim(owners: dict[str, str], thing: str, dialect: str) -> None:
    if thing in owners:
        raise NormalizeError(
            f"there are two of the name {thing!r}: in {owners[thing]!r} and in {dialect!r}",
            fix="rename one of them, or uninstall one of the packages",
        )
    owners[thing] = dialect
