"""The result of a bisection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from qfuse.plans import PlanData


class Origin(StrEnum):
    """Where a difference comes from.

    ``NONE``: the results do not differ. ``CAPTURE``: the captured graph, before any rewrite.
    ``EXPANSION``: what stays with every rewrite undone. ``REWRITE``: a rule of any stage.
    ``KERNEL``: the kernel of one op. ``BACKEND``: the code that the backend made of the graph.
    """

    NONE = "none"
    CAPTURE = "capture"
    EXPANSION = "expansion"
    REWRITE = "rewrite"
    KERNEL = "kernel"
    BACKEND = "backend"


@dataclass(frozen=True, slots=True)
class Culprit:
    """One rewrite after which results differ.

    Attributes:
        key: Its key: ``stage/rule@node``, or ``stage/rule`` for every site of a rule.
        rule: Name of the rule.
        op: The op of the node.
        where: The line of the user's source, or the path of the module, or "".
        kernel: The kernel that it calls, or "".
    """

    key: str
    rule: str
    op: str = ""
    where: str = ""
    kernel: str = ""

    @property
    def origin(self) -> Origin:
        """The kind of the rewrite."""
        return Origin.KERNEL if self.kernel else Origin.REWRITE


@dataclass(frozen=True, slots=True)
class Bisection:
    """What a difference comes from, and how to turn it off.

    Attributes:
        origin: Where it comes from.
        culprits: The rewrites, in the order in which they were found; usually one.
        error: The largest absolute difference as compiled; ``None`` if shapes differ.
        error_without: The same with ``options`` or with ``plan``.
        options: Options of :func:`qfuse.compile` that turn it off, verified by a run; ``None`` if
            there are none.
        plan: A plan that turns off these sites alone, verified by a run; ``None`` if there is none.
            Pass it to :func:`qfuse.compile`, or save it.
        verified: Whether results were seen not to differ with it.
        runs: How often the graph was rewritten and run.
        note: A sentence that says more, or "".
    """

    origin: Origin
    culprits: tuple[Culprit, ...] = ()
    error: float | None = None
    error_without: float | None = None
    options: Mapping[str, Any] | None = None
    plan: PlanData | None = None
    verified: bool = False
    runs: int = 0
    note: str = ""

    @property
    def found(self) -> bool:
        """Whether the results differ."""
        return self.origin is not Origin.NONE

    def __str__(self) -> str:
        lines = [_TITLES[self.origin]]
        for one in self.culprits:
            lines.append(f"  site    {one.key}")
            facts = (("rule", one.rule), ("op", one.op), ("kernel", one.kernel), ("at", one.where))
            lines += [f"  {name:7} {text}" for name, text in facts if text]
        if self.options is not None:
            lines.append(f"  off by  options={dict(self.options)!r}")
        if self.plan is not None:
            more = "only these sites: " if self.options is not None else ""
            lines.append(f"  off by  {more}compile(..., plan=result.plan)")
        if self.found:
            lines.append(f"  error   {_errors(self)}")
        if self.note:
            lines.append(f"  {self.note}")
        lines.append(f"  {self.runs} run{'s' * (self.runs != 1)} of the rewritten graph")
        return "\n".join(lines)


_TITLES = {
    Origin.NONE: "the results do not differ",
    Origin.CAPTURE: "the difference is in the captured graph, before any rewrite",
    Origin.EXPANSION: "the difference stays with every rewrite undone",
    Origin.REWRITE: "the difference comes from a rewrite",
    Origin.KERNEL: "the difference comes from a kernel",
    Origin.BACKEND: "the difference comes from the code that the backend made",
}


def _errors(result: Bisection) -> str:
    before = "shapes differ" if result.error is None else f"{result.error:.4g} at most"
    if not result.verified:
        return before
    after = "unknown" if result.error_without is None else f"{result.error_without:.4g}"
    return f"{before}, {after} without it, which was verified by a run"
