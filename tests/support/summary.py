"""The last lines of a run: what was not tested, how much was drawn, and what took longest."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = [
    "EXAMPLES",
    "SKIPPED",
    "drawn",
    "drawn_text",
    "examples_of",
    "longest_text",
    "not_tested",
    "not_tested_text",
    "skipped_of",
]

# The name of the property that carries a test's count from a worker process to the report.
EXAMPLES = "hypothesis examples"

# What an event of hypothesis begins with that says what was not asserted of an example, and why.
SKIPPED = "skipped: "

_CASES = re.compile(
    r"during generate phase.*\n.*\n\D*(\d+) passing, (\d+) failing, and (\d+) invalid"
)
_EVENTS = re.compile(rf"\* ([\d.]+)%, (?:{SKIPPED}|(?=invalid because))(.+)")
_COUNTS = re.compile(r"(\d+) passing\D+(\d+) failing")
_TOO_LARGE = "not run: it needs more choices than hypothesis draws for one example"
_NEEDS = re.compile(r"^(?:Skipped: )?(needs [^:;(\n]+)")


def examples_of(statistics: str) -> int:
    """How many examples hypothesis tried on one test, from the text of its statistics.

    Those that the test filtered out do not count.
    """
    return sum(int(n) for counts in _COUNTS.findall(statistics) for n in counts)


def skipped_of(statistics: str) -> Counter[str]:
    """How many examples of one test were skipped, or a part of their checks, by reason."""
    cases = _CASES.search(statistics)
    if cases is None:
        return Counter()
    passing, failing, invalid = map(int, cases.groups())
    found: Counter[str] = Counter()
    for share, reason in _EVENTS.findall(statistics):
        # Hypothesis counts the events of a run, and writes their share.
        found[reason] += round(float(share) * (passing + failing + invalid) / 100)
    found[_TOO_LARGE] = invalid - sum(n for why, n in found.items() if why.startswith("invalid"))
    return +found


def drawn(reports: Iterable[Any]) -> tuple[int, int]:
    """How many tests drew examples, and how many they drew together."""
    counts = [
        value for report in reports for name, value in report.user_properties if name == EXAMPLES
    ]
    return len(counts), sum(counts)


def drawn_text(tests: int, examples: int) -> str:
    """One line for :func:`drawn`."""
    return f"drawn: {examples:,} examples by {tests} property tests"


def not_tested(reports: Iterable[Any]) -> Counter[str]:
    """How many tests were skipped for each thing that this machine lacks."""
    return Counter(reason for report in reports for reason in _needed(report))


def _needed(report: Any) -> Iterator[str]:
    """What a skipped test needs; nothing if it was skipped for another reason."""
    if isinstance(report.longrepr, tuple):
        match = _NEEDS.match(report.longrepr[2])
        if match is not None:
            yield match[1].rstrip()


def not_tested_text(counts: Counter[str]) -> str:
    """One line for :func:`not_tested`: ``not tested on this machine: 12 tests need amx_int8``."""
    if not counts:
        return "not tested on this machine: nothing"
    parts: list[str] = []
    for reason, count in counts.most_common():
        verb = "test needs" if count == 1 else "tests need" if not parts else "need"
        parts.append(f"{count} {verb if count > 1 or not parts else 'needs'} {reason[6:]}")
    return f"not tested on this machine: {', '.join(parts)}"


def longest_text(reports: Iterable[Any], count: int = 5) -> str:
    """The files that took longest: ``longest: tests/test_it.py 12 s, tests/test_other.py 3 s``."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for report in reports:
        seconds[report.nodeid.partition("::")[0]] += report.duration
    most = sorted(seconds.items(), key=lambda item: -item[1])[:count]
    parts = [f"{name} {taken:.0f} s" for name, taken in most if taken >= 1]
    return f"longest: {', '.join(parts) or 'nothing took a second'}"
