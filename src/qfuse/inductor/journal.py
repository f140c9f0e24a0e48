"""The reports of the graphs that Inductor compiled or loaded from its cache.

On a cache hit no pass runs. So the report of a graph is a file named by the digest of its content,
and the digest is the key of an Inductor counter. Inductor stores the counters with the compiled
graph and adds them again when it is loaded, which tells the loading process the name of the report.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qfuse.inductor._inductor_api import count, counted
from qfuse.inductor.merge import STAGE
from qfuse.ir.events import Event, Fired, Missed, Noted, Place
from qfuse.ir.files import parse_json
from qfuse.report import Report
from qfuse.report.facts import Facts
from qfuse.rewrite.prelude import Exactness, MissCode
from qfuse.targets import cache_directory, write_atomically

PREFIX = "qfuse_report:"
_FORMAT = 1
_KINDS = {kind.__name__: kind for kind in (Fired, Missed, Noted)}
_PLACES = ("anchor", "at", "place")


@dataclass(slots=True, eq=False)
class GraphRecord:
    """One graph that Inductor compiles.

    Attributes:
        facts: Properties of the whole compilation.
        events: The events before and after freezing.
        before: Digest of the events before freezing, which happen in every process.
        loaded: Whether the rest came from a cache.
        stamped: Whether the report is on disk.
    """

    facts: dict[str, Any]
    events: list[Event] = field(default_factory=list)
    before: str = ""
    loaded: bool = False
    stamped: bool = False

    def report(self) -> Report:
        """Return it as a :class:`Report`."""
        origin = "loaded from Inductor's cache" if self.loaded else "compiled in this process"
        return Report(tuple(self.events), Facts(graph=origin, frozen=self.facts.get("frozen")))


class PassJournal:
    """The graphs of this process, in the order of compiling or loading."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._records: list[GraphRecord] = []
        self._seen: Counter[str] = Counter()
        self._activity = 0

    def open(self, record: GraphRecord) -> None:
        """Record a graph that is being compiled."""
        with self._lock:
            self.collect()
            self._activity += 1
            # Later events change the digest; what came before
            # freezing identifies the graph in any process.
            record.before = _digest(record)
            self._records.append(record)

    def stamp(self, record: GraphRecord) -> None:
        """Write the report of a graph, and store its name with the compiled graph."""
        with self._lock:
            self.collect()
            name = _write(record)
            count(PREFIX + name)
            # Counted here, so that `collect` does not take it for a graph that was loaded.
            self._seen[name] += 1
            record.stamped = True

    def reports(self) -> tuple[Report, ...]:
        """Return the report of every graph."""
        with self._lock:
            self.collect()
            return tuple(record.report() for record in self._records)

    def clear(self) -> None:
        """Clear the graphs so far; those already loaded from caches are not collected again."""
        with self._lock:
            self.collect()
            self._records.clear()

    def note(self, text: str) -> None:
        """Add a separate report with a note."""
        with self._lock:
            record = GraphRecord(
                {"entry point": "inductor"}, [Noted(STAGE, text, warn=True)], stamped=True
            )
            self._records.append(record)

    def activity(self) -> int:
        """Return a number that grows whenever a graph is compiled or loaded from a cache."""
        with self._lock:
            self.collect()
            return self._activity

    def collect(self) -> None:
        """Collect the graphs that were loaded from a cache since the last call."""
        now = {key.removeprefix(PREFIX): n for key, n in counted(PREFIX).items()}
        for name, times in now.items():
            # The user may have cleared the counters.
            known = self._seen[name] if times >= self._seen[name] else 0
            for _ in range(times - known):
                self._loaded(name)
            self._seen[name] = times

    def _loaded(self, name: str) -> None:
        self._activity += 1
        found = _read(name)
        for record in self._records:
            waits = not record.stamped and record.before == found.before
            # Its passes before freezing ran in this process, and the rest came from the cache.
            if waits:
                record.events, record.loaded, record.stamped = found.events, True, True
                return
        found.loaded = found.stamped = True
        self._records.append(found)


def _content(record: GraphRecord) -> dict[str, Any]:
    events = [{"kind": type(event).__name__, **asdict(event)} for event in record.events]
    return {"format": _FORMAT, "facts": record.facts, "before": record.before, "events": events}


def _digest(record: GraphRecord) -> str:
    text = json.dumps(_content(record), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _place(name: str) -> Path:
    return cache_directory() / "inductor" / name[:2] / f"{name}.json"


def _write(record: GraphRecord) -> str:
    """Write a report, if it does not exist, and return its name."""
    name = _digest(record)
    path = _place(name)
    # The name is a digest of the content, so an existing file has the same content.
    if not path.exists():
        try:
            write_atomically(path, json.dumps(_content(record), sort_keys=True))
        except OSError as error:
            text = f"the report cannot be stored for other processes at {path}: {error}"
            record.events.append(Noted(STAGE, text, warn=True))
    return name


def _read(name: str) -> GraphRecord:
    """Read the report of a graph that was loaded from a cache."""
    path = _place(name)
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        events = [_event(value) for value in content["events"]]
        return GraphRecord(content["facts"], events, content["before"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # The file may come from another version, or be gone: that must not fail a compilation.
        text = (
            f"a graph was loaded from Inductor's cache, but its report is missing at {path}: "
            "clear torch's caches to create both again"
        )
        return GraphRecord({"entry point": "inductor"}, [Noted(STAGE, text, warn=True)])


def _event(value: Mapping[str, Any]) -> Event:
    given = dict(value)
    kind = _KINDS[given.pop("kind")]
    for name in _PLACES:
        if given.get(name) is not None:
            given[name] = Place(**given[name])
    if kind is Fired:
        given["places"] = tuple(Place(**place) for place in given["places"])
        given["made"] = tuple(given["made"])
        given["exactness"] = Exactness(given["exactness"])
    if kind is Missed:
        given["code"] = MissCode(given["code"])
    return kind(**given)
