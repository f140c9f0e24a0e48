"""Shared code of qfuse's rowwise kernels: norms and activations with a fused quantize."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qfuse.ir.dtypes import FLOATS
from qfuse.ir.ops.norm_spec import NormSpec
from qfuse.ir.ops.norms import LayerNorm, RmsNorm
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import same_shape, same_size
from qfuse.kernels import KernelLibrary
from qfuse.lower.operands.checks import check_platform, typed
from qfuse.lower.problems.rowwise import RowwiseProblem
from qfuse.rewrite.prelude import Node, Rewriter
from qfuse.targets.target import Target


@dataclass(frozen=True, slots=True)
class RowwiseKernel:
    """A kernel that loads each row once.

    Attributes:
        library: The compiled kernels, or the reason why they are not available.
    """

    library: KernelLibrary

    def supported(self, target: Target) -> Refusal | None:
        """Refuse if the kernels could not be built, or would run without vector instructions."""
        refusal = check_platform(self.library, target)
        if refusal is not None:
            return refusal
        if self.library.instruction_sets[-1] == "portable":
            return Refusal("the processor has no supported vector instructions")
        return None


def check_residual(op: RmsNorm | LayerNorm) -> Refusal | None:
    """Refuse a residual that is not a float tensor of the input's shape."""
    if op.residual is None:
        return None
    if dtype_of(op.residual) not in FLOATS:
        return Refusal(f"the residual is {dtype_name(dtype_of(op.residual))}")
    if not same_shape(shape_of(op.residual), shape_of(op.x)):
        return Refusal("the residual is broadcast to the input, or the input to it")
    return None


def check_types(norm: NormSpec) -> Refusal | None:
    """Refuse computation in another dtype than float32, and other axes than the last."""
    if norm.axes != 1:
        return Refusal(f"it is over {norm.axes} axes")
    for dtype in (norm.compute, norm.product):
        if dtype is not torch.float32:
            return Refusal(f"it computes in {dtype_name(dtype)}")
    return None


def check_vectors(problem: RowwiseProblem, *vectors: Node | None) -> Refusal | None:
    """Refuse weights and biases that do not have one float per column."""
    for vector in vectors:
        if vector is None:
            continue
        if dtype_of(vector) not in FLOATS:
            return Refusal(f"its weight or bias is {dtype_name(dtype_of(vector))}")
        # A scalar fits no row.
        *lead, last = shape_of(vector) or (0,)
        if not same_size(last, problem.shape[-1]) or any(not same_size(s, 1) for s in lead):
            return Refusal("its weight or bias does not have one element per column")
    return None


def float_vector(node: Node | None, rw: Rewriter) -> Node | None:
    """Return a vector in the kernel's dtype; constants are converted ahead of time."""
    return None if node is None else typed(node, torch.float32, rw)
