"""Rules that installed packages add to the schedule.

A package adds rules with an entry point::

    [project.entry-points."qfuse.rules"]
    mine = "my_package:rules"

where ``my_package.rules`` is a :class:`~qfuse.rewrite.scheduled.ScheduledRules`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch._ops import OpOverload

from qfuse.extensions import OWN, Extension, Group, check_unique, load_extensions
from qfuse.optimize.rewrite_names import rewrite_names
from qfuse.optimize.schedule import rules_for_claims
from qfuse.rewrite.scheduled import ScheduledRules


def installed_rules() -> tuple[Extension[ScheduledRules], ...]:
    """Load the rules of installed packages, in the order of the names of their entry points.

    Raises:
        ExtensionError: An entry point is broken.
    """
    return load_extensions(Group.RULES, ScheduledRules)


def checked_rules(
    added: Collection[Extension[ScheduledRules]], claimed: Collection[OpOverload]
) -> tuple[ScheduledRules, ...]:
    """Return added rules, and those for ops that backends support; check their names.

    Raises:
        ExtensionError: Two rewrites have one name.
    """
    check_rule_names(added)
    return (*(some.value for some in added), *rules_for_claims(claimed))


def check_rule_names(added: Iterable[Extension[ScheduledRules]]) -> None:
    """Check that added rules have names of their own.

    Raises:
        ExtensionError: Two rewrites have one name; the message names both origins.
    """
    own = dict.fromkeys(rewrite_names(), OWN)
    names = ((rule.name, some.origin) for some in added for rule in some.value.rules)
    check_unique(own, names, "rule")
