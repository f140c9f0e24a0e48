"""The kernel protocol: what a kernel covers and accepts, its cost, and its call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from qfuse.cost.model import Workload
from qfuse.ir.ops.activation import Activation
from qfuse.ir.ops.convolution import FusedConvolution
from qfuse.ir.ops.linear import FusedLinear
from qfuse.ir.ops.norms import LayerNorm, RmsNorm
from qfuse.ir.refusal import Refusal
from qfuse.rewrite.prelude import Node, Rewriter
from qfuse.targets import Target

Span = tuple[type[Any], ...]
"""The ops that one kernel call fuses, as view types, from the first to the last."""

LINEAR: Span = (FusedLinear,)
CONVOLUTION: Span = (FusedConvolution,)
RMS_NORM: Span = (RmsNorm,)
LAYER_NORM: Span = (LayerNorm,)
ACTIVATION: Span = (Activation,)
LINEAR_ROWWISE: Span = (FusedLinear, Activation)
"""A linear and the rowwise op that uses it: a producer-consumer fusion."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The part of a problem that a kernel accepts.

    Attributes:
        steps: The number of leading epilogue ops; the rest is expanded after the kernel.
        output: Whether it quantizes the output; only if it covers every epilogue op.
        work: The cost, including the ops that are left after it.
        note: A remark for the report.
        loops: The cost of compiled loops for the same ops, if they are an alternative.
    """

    steps: int
    output: bool
    work: Workload
    note: str = ""
    loops: Workload | None = None


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
