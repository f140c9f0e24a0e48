"""Which rewrites may happen: a budget for bisection, and a list of banned ones."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RewriteBudget:
    """Asked before every rewrite, in the order in which they happen.

    Rewriting is deterministic, so the first ``fuel`` rewrites of two runs over the same graph
    are the same rewrites: a culprit is found by bisecting on ``fuel`` and kept out by its key.

    Attributes:
        fuel: How many rewrites may happen; ``None`` is no limit.
        banned: Keys of rewrites that may not, and names of rules of which none may
            (``lower/lower-linear``).
        allowed: Keys of the rewrites that happened, in order.
    """

    fuel: int | None = None
    banned: frozenset[str] = frozenset()
    allowed: list[str] = field(default_factory=list)

    def bans(self, key: str) -> bool:
        """Whether the rewrite ``key``, or its whole rule, is banned."""
        return key in self.banned or rule_of(key) in self.banned

    def allows(self, key: str) -> bool:
        """Whether the rewrite ``key`` may happen; if so it counts."""
        if self.bans(key) or (self.fuel is not None and len(self.allowed) >= self.fuel):
            return False
        self.allowed.append(key)
        return True


def rule_of(key: str) -> str:
    """Return the room and the rule of a key: ``lower/lower-linear`` of ``lower/lower-linear@n``."""
    return key.partition("@")[0]
