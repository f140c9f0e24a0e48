"""The interface of the problems that kernels compete for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from qfuse.lower.problems.span import Span


@dataclass(frozen=True, slots=True)
class Replaced:
    """A node that a kernel replaces.

    Attributes:
        node: The node.
        index: Index of the kernel's result that replaces it.
        but: Users that are not redirected, such as those that will be erased.
    """

    node: Node
    index: int = 0
    but: Collection[Node] = ()


class Problem(ABC):
    """One op of the graph, or several that one kernel may fuse.

    Attributes:
        rule: Name of the rewrite to a kernel, for events and the rewrite budget.
        has_rival: Whether there is an alternative without a kernel that may be faster.
    """

    __slots__ = ()

    rule: ClassVar[str]
    has_rival: ClassVar[bool] = False

    @property
    @abstractmethod
    def span(self) -> Span:
        """The kinds of its ops; the kernels that cover them are asked."""

    @property
    @abstractmethod
    def place(self) -> Node:
        """The op to name in the report."""

    @property
    @abstractmethod
    def anchor(self) -> Node:
        """The node that the kernel is inserted before."""

    @property
    @abstractmethod
    def replaced(self) -> tuple[Replaced, ...]:
        """The nodes that the kernel replaces."""

    def label(self, kernel: str) -> str:
        """Return the report's name for a kernel that was not selected."""
        return kernel
