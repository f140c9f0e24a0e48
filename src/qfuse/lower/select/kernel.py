"""What a kernel is: what it covers, what it takes of that, what it costs, and its call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from qfuse.cost.model import Plan
from qfuse.ir.ops.activation import Activation
from qfuse.ir.ops.linear import FusedLinear
from qfuse.ir.ops.norms import LayerNorm, RmsNorm
from qfuse.ir.refusal import Refusal
from qfuse.rewrite.prelude import Node, Rewriter
from qfuse.targets import Target

Span = tuple[type[Any], ...]
"""The ops of one call of a kernel, as their views, from the first to the last."""

LINEAR: Span = (FusedLinear,)
RMS_NORM: Span = (RmsNorm,)
LAYER_NORM: Span = (LayerNorm,)
ACTIVATION: Span = (Activation,)
LINEAR_ROWWISE: Span = (FusedLinear, Activation)
"""A linear and the rowwise op behind it: a producer-consumer fusion."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What part of a problem a kernel takes.

    Attributes:
        steps: How many epilogue steps, from the first; the rest is expanded behind the kernel.
        output: Whether it quantizes the output; only if it takes every step.
        work: What it costs, including what is left behind it.
        note: Anything worth telling a user.
        loops: What the loops cost that a compiler makes of the same, if it makes good ones.
    """

    steps: int
    output: bool
    work: Plan
    note: str = ""
    loops: Plan | None = None


P_contra = TypeVar("P_contra", contravariant=True)


class Kernel(Protocol[P_contra]):
    """One kernel of the registry, in a file of its own.

    Attributes:
        covers: The spans that it may run; it is asked about no others.
    """

    covers: ClassVar[tuple[Span, ...]]

    @property
    def name(self) -> str:
        """What the report calls it."""

    def supported(self, target: Target) -> Refusal | None:
        """Return why this platform cannot run it, or ``None``."""

    def accepts(self, problem: P_contra) -> Claim | Refusal:
        """Return what it takes of ``problem`` and what that costs, or why it takes nothing."""

    def emit(self, problem: P_contra, claim: Claim, rw: Rewriter) -> Mapping[int, Node]:
        """Add the call, packed constants included; return the results of the op by index."""
