"""What the class of a rule has to declare, checked before rules of other packages are used."""

from __future__ import annotations

from inspect import get_annotations
from typing import Any

from torch._ops import OpOverload

from qfuse.ir.errors import ExtensionError
from qfuse.rewrite.rule import Rule


def check_declared(rule: Rule[Any], where: str) -> None:
    """Check that a rule sets what its bases declare, and that its anchors are op overloads.

    Args:
        rule: The rule.
        where: Where it is from, for messages, as "the dialect 'mine'".

    Raises:
        ExtensionError: It does not. The rule would fail later, or never match.
    """
    owner = f"{type(rule).__name__} of {where}"
    for kind in reversed(type(rule).__mro__):
        # A base in another package may declare attributes that it sets elsewhere.
        if not kind.__module__.startswith("qfuse."):
            continue
        for name, declared in get_annotations(kind).items():
            if "ClassVar" in str(declared) and not hasattr(rule, name):
                raise ExtensionError(
                    f"the rule {owner} has no {name!r}",
                    fix=f"set the class attribute {name!r}: {declared}",
                )
    if not isinstance(rule.anchors, (tuple, list)):
        raise ExtensionError(
            f"the anchors of the rule {owner} are not a tuple",
            fix=f"write ({_spelled(rule.anchors)},)",
        )
    for anchor in rule.anchors:
        if not isinstance(anchor, OpOverload):
            raise ExtensionError(
                f"the anchor {anchor} of the rule {owner} is not an OpOverload, so no node matches",
                fix=f"write {_spelled(anchor)}",
            )


def _spelled(anchor: object) -> str:
    """Return how to write an anchor: with the namespace and the overload."""
    if isinstance(anchor, OpOverload):
        return f"torch.ops.{anchor}"
    # A packet of overloads, such as `torch.ops.aten.relu`.
    if hasattr(anchor, "overloads"):
        return f"torch.ops.{anchor}.default"
    if isinstance(anchor, str):
        return f"torch.ops.{anchor.replace('::', '.')}.default"
    return "torch.ops.NAMESPACE.NAME.default"
