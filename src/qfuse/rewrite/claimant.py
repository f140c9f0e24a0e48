"""Who claims ops of an optimized graph, instead of lowering them to qfuse's kernels."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, Protocol

from torch._ops import OpOverload
from torch.fx import Node

from qfuse.ir.refusal import Refusal


class Claimant(Protocol):
    """Claims ops of an optimized graph. A backend is one; see ``qfuse.backends.Backend``."""

    @property
    def name(self) -> str:
        """The name in the report."""

    @property
    def supported_ops(self) -> Collection[OpOverload]:
        """The ops that it is asked about: those of qfuse, and any others of the graph."""

    def is_legal(self, node: Node) -> Literal[True] | Refusal:
        """Return ``True`` to claim ``node``, or why it cannot be claimed."""
