"""The kernel protocol: what a kernel covers and accepts, its cost, and its call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from qfuse.ir.refusal import Refusal
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.conditions import Conditions
from qfuse.lower.problems.span import Span
from qfuse.rewrite.prelude import Node, Rewriter
from qfuse.targets import Target

P_contra = TypeVar("P_contra", contravariant=True)


class Kernel(Protocol[P_contra]):
    """One kernel of the registry, defined in its own file.

    Attributes:
        covers: The spans that it may fuse; it is asked only about these.
    """

    covers: ClassVar[tuple[Span, ...]]

    @property
    def name(self) -> str:
        """The name in the report."""

    def supported(self, target: Target) -> Refusal | None:
        """Return why the target cannot run it, or ``None``."""

    def accepts(self, problem: P_contra) -> Claim | Refusal:
        """Return the accepted part of ``problem`` and its cost, or why it is refused."""

    def emit(self, problem: P_contra, claim: Claim, rw: Rewriter) -> Mapping[int, Node]:
        """Emit the call and its packed constants; return the results of the op by index."""


@runtime_checkable
class Conditional(Protocol):
    """A kernel that declares what it requires, so that reports say how close it came.

    Its ``accepts`` returns what :func:`~qfuse.lower.problems.conditions.hold` says of them. A
    refusal of a kernel without conditions counts as the first of one.
    """

    def conditions(self, problem: Any) -> Conditions:
        """Return the conditions for ``problem`` in the order of their checks."""
