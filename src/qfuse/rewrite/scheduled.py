"""Rules of other packages, and their place among the phases of the optimize stage."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from qfuse.ir.errors import ExtensionError
from qfuse.rewrite.declared import check_declared
from qfuse.rewrite.rule import Rule


class Phase(StrEnum):
    """The phases of the optimize stage, in their order.

    ``FOLD`` computes constants around products, ``MOVE`` moves quantize up and dequantize down,
    ``MERGE`` merges linears and convolutions with the same input, ``SPLIT`` moves splits down,
    ``FUSE`` fuses operands, epilogues and outputs, and ``ATTENTION`` changes how attention loads
    its operands.
    """

    FOLD = "fold"
    MOVE = "move"
    MERGE = "merge"
    SPLIT = "split"
    FUSE = "fuse"
    ATTENTION = "attention"


@dataclass(frozen=True, slots=True)
class ScheduledRules:
    """Rules, and where they run. Give exactly one of ``after`` and ``group``.

    Attributes:
        rules: The classes of the rules, in the order in which they are tried at a node.
        after: The phase after which they run, to a fixpoint of their own.
        group: The phase whose own rules they join: both run together, to one fixpoint; qfuse's
            are tried first. ``MERGE`` has no rules to join.

    Raises:
        ExtensionError: There is not exactly one place, or something is not a rule.
    """

    rules: tuple[type[Rule[Any]], ...]
    after: Phase | None = None
    group: Phase | None = None

    def __post_init__(self) -> None:
        if (self.after is None) == (self.group is None) or self.group is Phase.MERGE:
            raise ExtensionError(
                f"after={self.after}, group={self.group} is not a place of rules",
                fix="give after=Phase.FUSE, or group=Phase.FUSE; Phase.MERGE can only be after",
            )
        given: tuple[Any, ...] = self.rules
        for rule in given:
            if not isinstance(rule, type) or not issubclass(rule, Rule):
                raise ExtensionError(
                    f"{rule!r} is not a class of rules",
                    fix="give subclasses of qfuse.rewrite.rule.Rule, not instances",
                )
            check_declared(rule(), rule.__module__)
