"""The type that means "no, because"."""

from __future__ import annotations


class Refusal:
    """Why something was not done.

    A :class:`~qfuse.rewrite.rule.Miss` is a refusal of a rule: it adds a code and the node that
    caused it.

    Args:
        reason: A message for users, without a trailing period.
    """

    __slots__ = ("_reason",)

    def __init__(self, reason: str) -> None:
        self._reason = reason

    @property
    def reason(self) -> str:
        """The message."""
        return self._reason

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.reason!r})"
