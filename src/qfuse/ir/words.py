"""Words of messages that depend on what they name."""

from __future__ import annotations

import re

# As they are said: "an int" and "an LSTM", but "a uint8" and "a UserDict".
_AN = re.compile(r"(?i:[aeio]|u(?!int|ni|se))|nd|[FHLMNRSX](?=[A-Z0-9])")


def with_article(noun: str) -> str:
    """Return a noun behind its article.

    >>> with_article("ExportedProgram"), with_article("uint8")
    ('an ExportedProgram', 'a uint8')
    """
    return f"an {noun}" if _AN.match(noun) else f"a {noun}"


def a_kind(value: object) -> str:
    """Return the class of a value behind its article, or ``None`` as it is.

    >>> a_kind(3), a_kind("three"), a_kind(None)
    ('an int', 'a str', 'None')
    """
    return "None" if value is None else with_article(type(value).__name__)
