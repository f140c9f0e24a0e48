"""The part of an epilogue that qfuse's own kernels compute, and the cost of the rest."""

from __future__ import annotations

import torch

from qfuse.cost.work import WorkRange, pointwise_work, without_calls
from qfuse.ir.ops.epilogue import Act, Add, Cast, Mul, Step
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import same_shape
from qfuse.lower.operands.checks import FLOATS, bits_of, takes_output
from qfuse.lower.problems.epilogue_text import KernelSteps
from qfuse.lower.problems.product import ProductProblem
from qfuse.lower.select.kernel import Claim

KERNEL_ACTIVATIONS = frozenset(
    {
        "relu",
        "gelu",
        "gelu_tanh",
        "silu",
        "sigmoid",
        "tanh",
        "hardtanh",
        "hardswish",
        "hardsigmoid",
        "leaky_relu",
    }
)
"""The activations of ``StepKind`` in kernels/csrc/kernel_api.h."""


def is_covered(step: Step) -> bool:
    """Whether the kernels support an epilogue op."""
    match step:
        case Act(name):
            return name in KERNEL_ACTIVATIONS
        case Cast(dtype):
            return dtype in FLOATS
        case Mul(rounded=rounded):
            return rounded is None
        case _:
            return isinstance(step, Add)


def covered_steps(problem: ProductProblem) -> int:
    """Return how many leading epilogue ops the kernels compute, within their limits."""
    count = 0
    for step in problem.fused.epilogue.steps:
        if not is_covered(step) or not _reads_whole_floats(problem, step):
            break
        if isinstance(KernelSteps.of_product(problem.fused, count + 1), Refusal):
            break
        count += 1
    return count


def _reads_whole_floats(problem: ProductProblem, step: Step) -> bool:
    """Whether the operand of an epilogue op has floats of at most 32 bits, one per element."""
    if not isinstance(step, (Add, Mul)):
        return True
    extra = problem.fused.extras[step.index]
    return dtype_of(extra) in FLOATS and same_shape(shape_of(extra), shape_of(problem.fused.node))


def kernel_steps(problem: ProductProblem, claim: Claim) -> KernelSteps:
    """Return the claimed epilogue ops in the syntax of the kernels."""
    steps = KernelSteps.of_product(problem.fused, claim.steps)
    assert isinstance(steps, KernelSteps), "the claim covers supported ops"
    return steps


def claimed_dtype(problem: ProductProblem, claim: Claim) -> torch.dtype:
    """Return the float dtype of the result of the claimed epilogue ops."""
    return problem.fused.float_types()[claim.steps]


def claims_output(problem: ProductProblem, steps: int) -> bool:
    """Whether a kernel that computes ``steps`` epilogue ops also quantizes the result."""
    fused = problem.fused
    whole = steps == len(fused.epilogue.steps)
    return whole and fused.out_params is not None and takes_output(fused)


def loops_behind(problem: ProductProblem, steps: int) -> list[WorkRange]:
    """Return the work of the epilogue ops after ``steps``, which are compiled to one loop."""
    fused = problem.fused
    if steps == len(fused.epilogue.steps):
        return []
    read, written = bits_of(fused.float_types()[steps]), bits_of(dtype_of(fused.node))
    loop = pointwise_work(problem.rows * problem.n, [read], [written])
    return [without_calls(loop)]
