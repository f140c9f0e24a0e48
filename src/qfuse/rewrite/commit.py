"""Prove a rewrite and keep it, or undo it and say so: for all that runs without the driver."""

from __future__ import annotations

from qfuse.ir.events import EventLog, Exactness, Place, RolledBack
from qfuse.rewrite.driver import RewriteContext
from qfuse.rewrite.rewriter import Rewriter


def verify_and_commit(
    rw: Rewriter,
    context: RewriteContext,
    log: EventLog,
    key: str,
    exactness: Exactness,
    place: Place,
) -> bool:
    """Commit what ``rw`` did if its values hold; undo it otherwise.

    Args:
        rw: The finished rewrite.
        context: The checker, if there is one.
        log: Told of a rewrite that is undone.
        key: ``room/rule@node``.
        exactness: What the rewrite may do to values.
        place: Where it happened.

    Returns:
        Whether the rewrite was kept.
    """
    checker = context.checker
    wrong = None if checker is None else checker.check(rw.journal, exactness, key)
    if wrong is not None:
        rw.undo()
        rule = key.partition("@")[0].partition("/")[2]
        log.add(RolledBack(context.stage, rule, key, (place,), wrong))
        return False
    erased, _ = rw.commit()
    if checker is not None:
        checker.forget(erased)
    return True
