"""The part of an epilogue that qfuse's own kernels compute, and the cost of the rest."""

from __future__ import annotations

import torch

from qfuse.cost.work import WorkRange, pointwise_work, without_calls
from qfuse.ir.dtypes import BYTES, FLOATS, bit_width
from qfuse.ir.ops.epilogue import Act, Add, Cast, EpilogueOp, Mul, Prelu
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.refusal import Refusal
from qfuse.lower.operands.checks import takes_output
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.epilogue_limits import KERNEL_ACTIVATIONS, PRELU
from qfuse.lower.problems.epilogue_text import KernelEpilogue
from qfuse.lower.problems.product import ProductProblem
from qfuse.rewrite.prelude import Node, Rewriter


def is_covered(step: EpilogueOp) -> bool:
    """Whether the kernels support an epilogue op."""
    match step:
        case Act(name):
            return name in KERNEL_ACTIVATIONS
        case Prelu():
            return PRELU in KERNEL_ACTIVATIONS
        case Cast(dtype):
            return dtype in FLOATS
        case Mul(rounded=rounded):
            return rounded is None
        case _:
            return isinstance(step, Add)


def covered_ops(problem: ProductProblem) -> int:
    """Return how many leading epilogue ops the kernels compute, within their limits."""
    count = 0
    steps, types = problem.fused.epilogue.ops, problem.fused.float_types()
    for step, real in zip(steps, types, strict=False):
        if not is_covered(step) or not _is_readable(problem, step, real):
            break
        if isinstance(KernelEpilogue.of_product(problem.fused, count + 1), Refusal):
            break
        count += 1
    return count


def _is_readable(problem: ProductProblem, step: EpilogueOp, float_dtype: torch.dtype) -> bool:
    """Whether the kernels read the operand of an epilogue op with an input of ``float_dtype``.

    They broadcast floats of at most 32 bits and quantized values to the result. A 0-d tensor does
    not take part in type promotion, which the kernels do not know.
    """
    if not isinstance(step, (Add, Mul, Prelu)):
        return True
    extra = problem.fused.extras[step.index]
    if not isinstance(step, Prelu) and step.stored is not None:
        return dtype_of(extra) in BYTES and len(shape_of(extra)) > 0
    return dtype_of(extra) in FLOATS and (
        len(shape_of(extra)) > 0 or dtype_of(extra) is float_dtype
    )


def kernel_epilogue(problem: ProductProblem, claim: Claim) -> KernelEpilogue:
    """Return the claimed epilogue ops in the syntax of the kernels."""
    steps = KernelEpilogue.of_product(problem.fused, claim.ops)
    assert isinstance(steps, KernelEpilogue), "the claim covers supported ops"
    return steps


def epilogue_operands(steps: KernelEpilogue, rw: Rewriter) -> list[Node] | None:
    """Return the operands of the epilogue with at least one axis."""
    reshape = torch.ops.aten.reshape.default
    given = [e if shape_of(e) else rw.call(reshape, e, [1]) for e in steps.extras]
    return given or None


def claimed_dtype(problem: ProductProblem, claim: Claim) -> torch.dtype:
    """Return the float dtype of the result of the claimed epilogue ops."""
    return problem.fused.float_types()[claim.ops]


def claims_output(problem: ProductProblem, steps: int) -> bool:
    """Whether a kernel that computes ``steps`` epilogue ops also quantizes the result."""
    fused = problem.fused
    whole = steps == len(fused.epilogue.ops)
    return whole and fused.out_params is not None and takes_output(fused)


def loops_behind(problem: ProductProblem, steps: int) -> list[WorkRange]:
    """Return the work of what follows the first ``steps`` epilogue ops, compiled to one loop.

    That is the other epilogue ops, and the output quantize if the kernel does not cover it.
    """
    fused = problem.fused
    quantizes = fused.out_params is not None and not claims_output(problem, steps)
    if steps == len(fused.epilogue.ops) and not quantizes:
        return []
    read, written = bit_width(fused.float_types()[steps]), bit_width(dtype_of(fused.node))
    loop = pointwise_work(problem.outputs, [read], [written])
    return [without_calls(loop)]
