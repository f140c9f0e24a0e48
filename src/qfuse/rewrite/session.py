"""Permits, checks, commits and logs every rewrite; the only place that does so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch.fx import Node

from qfuse.ir.errors import RewriteError
from qfuse.ir.events import Checked, Event, EventLog, Exactness, RolledBack
from qfuse.ir.graph.stage_graph import StageGraph, place_of
from qfuse.ir.out_of_memory import shortage_of
from qfuse.ir.refusal import Refusal
from qfuse.rewrite.context import Edit, RewriteContext
from qfuse.rewrite.rewriter import GraphEditor, Rewriter

T = TypeVar("T")


class Denied(Refusal):
    """The budget does not permit a rewrite.

    Args:
        banned: Whether the rewrite or its rule is banned; otherwise the fuel is spent.
    """

    __slots__ = ("banned",)

    def __init__(self, *, banned: bool) -> None:
        super().__init__("it is not permitted")
        self.banned = banned


class Undone(Refusal):
    """A rewrite was tried and rolled back.

    Args:
        wrong: What was wrong with it.
    """

    __slots__ = ("wrong",)

    def __init__(self, wrong: str) -> None:
        super().__init__("it was rolled back here")
        self.wrong = wrong


@dataclass(frozen=True, slots=True)
class Applied(Generic[T]):
    """A rewrite that was committed.

    Attributes:
        made: The result of the edit.
        erased: The erased nodes.
        around: The nodes whose neighbours changed.
    """

    made: T
    erased: Sequence[Node]
    around: Sequence[Node]


class RewriteSession:
    """Rewrites one graph; every rewrite of a rule, pass or kernel goes through it.

    Args:
        program: The graph.
        context: The budget and the checker.
    """

    def __init__(self, program: StageGraph, context: RewriteContext) -> None:
        self.program = program
        self.context = context
        self.editor = GraphEditor(program.module)

    def rewrite(
        self,
        rule: str,
        node: Node,
        edit: Callable[[Rewriter], T],
        *,
        proof: Exactness | None,
        event: Callable[[str, Rewriter, T], Event | None] | None = None,
    ) -> Applied[T] | Denied | Undone:
        """Edit the graph at ``node`` if permitted, and keep the edit if its values match.

        Args:
            rule: Name of the rule, pass or lowering.
            node: The anchor: new nodes are inserted right before it.
            edit: Edits the graph. A RewriteError that it raises undoes the rewrite.
            proof: The exactness that a check by values must show; ``None`` skips the check.
            event: Makes the event to log, from the key, the rewriter and what ``edit`` returned.
                It is called before the commit, which erases nodes.

        Returns:
            The committed rewrite, or why it was not applied.
        """
        key, budget = self.context.key(rule, node), self.context.budget
        if not budget.allows(key, place_of(node)):
            return Denied(banned=budget.bans(key))
        return self._attempt(rule, node, edit, proof, event)

    def rewrite_always(
        self, rule: str, node: Node, edit: Callable[[Rewriter], T], *, proof: Exactness
    ) -> Applied[T] | Undone:
        """Edit the graph at ``node`` outside the budget, for edits that must not be skipped."""
        return self._attempt(rule, node, edit, proof, None)

    def _attempt(
        self,
        rule: str,
        node: Node,
        edit: Callable[[Rewriter], T],
        proof: Exactness | None,
        event: Callable[[str, Rewriter, T], Event | None] | None,
    ) -> Applied[T] | Undone:
        key, place = self.context.key(rule, node), place_of(node)
        rw = self.editor.rewriter(rule, node)
        try:
            made = edit(rw)
            wrong = self._prove(rw, proof, key)
        except RewriteError as error:
            if shortage_of(error) is not None:
                raise
            wrong = error.what
        else:
            if wrong is None:
                happened = None if event is None else event(key, rw, made)
                return self._commit(rw, Edit(rule, place, _replaced(rw)), made, happened)
        # The rewriter may have undone it before it raised; a second undo does nothing.
        rw.undo()
        log = self.program.log
        log.add(
            RolledBack(self.context.stage, rule, key, (place,), wrong, "", *_measured(log, key))
        )
        return Undone(wrong)

    def _prove(self, rw: Rewriter, proof: Exactness | None, key: str) -> str | None:
        checker = self.context.checker
        if checker is None or proof is None:
            return None
        return checker.check(rw.journal, proof, key)

    def _commit(self, rw: Rewriter, edit: Edit, made: T, event: Event | None) -> Applied[T]:
        erased, around = rw.commit()
        if self.context.checker is not None:
            self.context.checker.forget(erased)
        self.context.edits.append(edit)
        if event is not None:
            self.program.log.add(event)
        return Applied(made, erased, around)


def _measured(log: EventLog, key: str) -> tuple[float | None, float | None]:
    """Return error and bound of the check that a rewrite failed; ``None`` if it failed without."""
    failed = [check for check in log.of(Checked) if check.what == key and not check.passed]
    return (failed[-1].error, failed[-1].allowed) if failed else (None, None)


def _replaced(rw: Rewriter) -> tuple[tuple[str, str], ...]:
    return tuple((old.name, new.name) for old, new in rw.journal.replaced)
