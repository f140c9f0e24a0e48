"""What every problem has that kernels compete for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from qfuse.lower.select.kernel import Span


@dataclass(frozen=True, slots=True)
class Replaced:
    """A node that a kernel stands for.

    Attributes:
        node: The node.
        index: Which of the kernel's results it is.
        but: Users that go on reading it, such as those that will die.
    """

    node: Node
    index: int = 0
    but: Collection[Node] = ()


class Problem(ABC):
    """One op of the graph, or several that one kernel may run.

    Attributes:
        rule: Name of the rewrite that puts a kernel there, for events and permissions.
        has_rival: Whether something else than a kernel runs it well.
    """

    __slots__ = ()

    rule: ClassVar[str]
    has_rival: ClassVar[bool] = False

    @property
    @abstractmethod
    def span(self) -> Span:
        """The ops that it is made of; kernels that cover them are asked."""

    @property
    @abstractmethod
    def place(self) -> Node:
        """The op that the report names."""

    @property
    @abstractmethod
    def anchor(self) -> Node:
        """Where the kernel is put."""

    @property
    @abstractmethod
    def replaced(self) -> tuple[Replaced, ...]:
        """What the kernel stands for."""

    def label(self, kernel: str) -> str:
        """Return what the report calls a kernel that loses here."""
        return kernel
