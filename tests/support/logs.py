"""What is logged in a block: the suite runs without pytest's logging plugin.

The plugin adds two handlers to each of torch's 40 loggers for every setup, call and teardown.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Kept(logging.Handler):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def logged(level: int) -> Iterator[list[logging.LogRecord]]:
    """Collect what qfuse logs at ``level`` or above."""
    logger, kept = logging.getLogger("qfuse"), _Kept(level)
    before = logger.level
    logger.addHandler(kept)
    logger.setLevel(level)
    try:
        yield kept.records
    finally:
        logger.setLevel(before)
        logger.removeHandler(kept)
