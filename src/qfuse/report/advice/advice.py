"""What a suggestion is, and what it answers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from qfuse.ir.events import MissCode

OF_A_MODULE = "it is the weight of a module"
"""The context of a weight that a function which replaces modules finds."""
LOOKED_UP = "quantize-activations-of-experts"
"""The suggestion for weights that are looked up at run time."""

OF_AN_EINSUM = "einsum-as-linear"
"""The suggestion for the weight of an einsum that is not a linear."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why something is not fused.

    Attributes:
        code: Code of the miss; ``None`` for an op that was left or not recognized.
        tried: The rule or kernel that came closest, or what is left.
        reason: The condition that failed, as a message.
        context: Why the op was left, if it is a quantize or dequantize, or :data:`OF_A_MODULE`.
    """

    code: MissCode | None
    tried: str
    reason: str
    context: str = ""


@dataclass(frozen=True, slots=True)
class Advice:
    """One suggestion, for one cause.

    Attributes:
        name: A stable name, for tools and tests.
        do: What to change, in at most 74 characters.
        codes: The codes that it answers; ``None`` among them: left or not recognized.
        reason: A regular expression that the reason has to contain.
        tried: A regular expression that the rule or kernel has to contain.
    """

    name: str
    do: str
    codes: tuple[MissCode | None, ...]
    reason: str = ""
    tried: str = ""

    @property
    def link(self) -> str:
        """The entry in the documentation."""
        return f"docs/report.md#{self.name}"

    def to_dict(self) -> dict[str, str]:
        """Return it as plain data."""
        return {"name": self.name, "do": self.do, "link": self.link}

    def answers(self, cause: Cause) -> bool:
        """Whether the suggestion is about this cause."""
        return (
            cause.code in self.codes
            and re.search(self.reason, f"{cause.reason}; {cause.context}") is not None
            and re.search(self.tried, cause.tried) is not None
        )
