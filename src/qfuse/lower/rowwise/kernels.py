"""qfuse's own kernels of rows: norms and activations that give codes in one reading."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx.node import Argument

from qfuse.ir.ops.activation import Activation
from qfuse.ir.ops.epilogue import Epilogue, Glu, Halves, Mul, Step
from qfuse.ir.ops.norm_spec import NormSpec, Statistic
from qfuse.ir.ops.norms import LayerNorm, RmsNorm
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.ir.sizes import same_shape, same_size
from qfuse.kernels import KernelLibrary
from qfuse.lower.kernel.operands import (
    FLOATS,
    MOST_EXTRAS,
    MOST_STEPS,
    check_platform,
    is_plain,
    typed,
)
from qfuse.lower.kernel.protocol import Refusal
from qfuse.lower.rowwise.problem import RowKernel, RowOp, RowProblem, check_output, output_args
from qfuse.rewrite.prelude import Node, Rewriter
from qfuse.targets.target import Target


@dataclass(frozen=True, slots=True)
class _Row:
    library: KernelLibrary

    def supported(self, target: Target) -> Refusal | None:
        """Refuse where the kernels could not be built, or would run without vectors."""
        refusal = check_platform(self.library, target)
        if refusal is not None:
            return refusal
        if self.library.instruction_sets[-1] == "portable":
            return Refusal("the processor has no vector instructions that it knows")
        return None


@dataclass(frozen=True, slots=True)
class RmsNormQuantized(_Row):
    """The row of ``qfuse::rms_norm_quantized``."""

    name: str = "qfuse.rms_norm_quantized"
    op: type[RowOp] = RmsNorm

    def accepts(self, problem: RowProblem) -> int | Refusal:
        """Take an RMS norm over the last axis whose statistics are float32."""
        op = problem.op
        assert isinstance(op, RmsNorm), "it is asked for its op only"
        refusal = (
            check_output(problem)
            or _check_residual(op)
            or _check_types(op.norm)
            or _check_vectors(problem, op.weight)
            or _check_rounding(op)
        )
        # The mean of squares.
        return refusal or _passes(problem, 1)

    def emit(self, problem: RowProblem, rw: Rewriter) -> Node:
        """Add the call."""
        op = problem.op
        assert isinstance(op, RmsNorm), "it was accepted"
        weight, norm = _vector(op.weight, rw), op.norm
        args: list[Argument] = [op.x, op.residual, weight, norm.eps, norm.rounded, norm.out]
        return rw.call(torch.ops.qfuse.rms_norm_quantized.default, *args, *output_args(problem))


@dataclass(frozen=True, slots=True)
class LayerNormQuantized(_Row):
    """The row of ``qfuse::layer_norm_quantized``."""

    name: str = "qfuse.layer_norm_quantized"
    op: type[RowOp] = LayerNorm

    def accepts(self, problem: RowProblem) -> int | Refusal:
        """Take a layer norm over the last axis that rounds once, behind the bias."""
        op = problem.op
        assert isinstance(op, LayerNorm), "it is asked for its op only"
        refusal = (
            check_output(problem)
            or _check_residual(op)
            or _check_centred(op.norm)
            or _check_vectors(problem, op.weight, op.bias)
        )
        # The mean and the variance.
        return refusal or _passes(problem, 2)

    def emit(self, problem: RowProblem, rw: Rewriter) -> Node:
        """Add the call."""
        op = problem.op
        assert isinstance(op, LayerNorm), "it was accepted"
        weight, bias = _vector(op.weight, rw), _vector(op.bias, rw)
        args: list[Argument] = [op.x, op.residual, weight, bias, op.norm.eps, op.norm.out]
        return rw.call(torch.ops.qfuse.layer_norm_quantized.default, *args, *output_args(problem))


@dataclass(frozen=True, slots=True)
class ActivationQuantized(_Row):
    """The row of ``qfuse::activation_quantized``."""

    name: str = "qfuse.activation_quantized"
    op: type[RowOp] = Activation

    def accepts(self, problem: RowProblem) -> int | Refusal:
        """Take the steps that the linears' kernels take too, on a float input."""
        op = problem.op
        assert isinstance(op, Activation), "it is asked for its op only"
        return _check_steps(op) or check_output(problem) or _passes(problem, 0)

    def emit(self, problem: RowProblem, rw: Rewriter) -> Node:
        """Add the call."""
        op = problem.op
        assert isinstance(op, Activation), "it was accepted"
        x, extras, glu = op.x, list(op.extras), _glu(op)
        if glu is not None:
            x, up = _halves(op.x, glu, rw)
            extras = [up]
        steps = str(Epilogue(_steps(op)))
        args: list[Argument] = [x, extras or None, steps, problem.spec.real]
        return rw.call(torch.ops.qfuse.activation_quantized.default, *args, *output_args(problem))


def _glu(op: Activation) -> Glu | None:
    """Return the step that multiplies the halves of the input, if that comes first."""
    first = next(iter(op.epilogue.steps), None)
    return first if isinstance(first, Glu) else None


def _steps(op: Activation) -> tuple[Step, ...]:
    """Return the steps on one half of the input, the other half being the first operand."""
    glu, steps = _glu(op), op.epilogue.steps
    return steps if glu is None else (glu.act, Mul(0), *steps[1:])


def _halves(x: Node, glu: Glu, rw: Rewriter) -> tuple[Node, Node]:
    """Return the gate and the other half, which are rows with a stride."""
    *_, size = shape_of(x)
    assert isinstance(size, int), "only an axis of known size is halved"
    cut = torch.ops.aten.slice.Tensor
    low, high = rw.call(cut, x, -1, 0, size // 2), rw.call(cut, x, -1, size // 2, size)
    return (low, high) if glu.halves is Halves.GATE_FIRST else (high, low)


def row_kernels(library: KernelLibrary) -> tuple[RowKernel, ...]:
    """Return the rows; each takes another op."""
    return (RmsNormQuantized(library), LayerNormQuantized(library), ActivationQuantized(library))


def _passes(problem: RowProblem, statistics: int) -> int:
    """Return how many readings of a compiler's loops one reading is worth.

    Loops read a row once for each statistic, once for its extremes, and once for the codes. With
    given parameters it is one all the same: loops that vectorize alike were measured to be as fast
    or faster, although they read a row again. Extremes are what they are slow at.
    """
    return 1 if problem.output.choose is None else statistics + 2


def _check_residual(op: RmsNorm | LayerNorm) -> Refusal | None:
    if op.residual is None:
        return None
    if dtype_of(op.residual) not in FLOATS:
        return Refusal(f"the residual is {dtype_name(dtype_of(op.residual))}")
    if not same_shape(shape_of(op.residual), shape_of(op.x)):
        return Refusal("the residual is spread over the input, or the input over it")
    return None


def _check_types(norm: NormSpec) -> Refusal | None:
    """Refuse statistics or products that are not float32, and more axes than the last."""
    if norm.axes != 1:
        return Refusal(f"it is over {norm.axes} axes")
    for dtype in (norm.compute, norm.product):
        if dtype is not torch.float32:
            return Refusal(f"it computes in {dtype_name(dtype)}")
    return None


def _check_rounding(op: RmsNorm) -> Refusal | None:
    """Refuse a norm that rounds behind the weight to another type than its result's."""
    norm = op.norm
    scaled = norm.rounded
    if op.weight is not None:
        scaled = torch.promote_types(scaled, dtype_of(op.weight))
    if norm.rounded not in FLOATS or norm.out not in FLOATS:
        return Refusal(f"it rounds to {dtype_name(norm.rounded)}")
    if scaled not in {norm.out, torch.float32}:
        return Refusal(f"it rounds to {dtype_name(scaled)} and then to {dtype_name(norm.out)}")
    return None


def _check_centred(norm: NormSpec) -> Refusal | None:
    if norm.axes != 1:
        return Refusal(f"it is over {norm.axes} axes")
    if norm.statistic is Statistic.WHOLE:
        # Torch computes in float32 and rounds once, to the type that it is given.
        if norm.compute not in {norm.out, torch.float32} or norm.out not in FLOATS:
            types = f"{dtype_name(norm.compute)} and then to {dtype_name(norm.out)}"
            return Refusal(f"it rounds to {types}")
        return None
    refusal = _check_types(norm)
    if refusal is None and norm.rounded is not torch.float32:
        return Refusal(f"it rounds to {dtype_name(norm.rounded)} before the weight")
    return refusal


def _check_vectors(problem: RowProblem, *vectors: Node | None) -> Refusal | None:
    """Refuse weights and biases that are not one float per column."""
    for vector in vectors:
        if vector is None:
            continue
        if dtype_of(vector) not in FLOATS:
            return Refusal(f"its weight or bias is {dtype_name(dtype_of(vector))}")
        *lead, last = shape_of(vector) or (0,)
        if not same_size(last, problem.shape[-1]) or any(not same_size(s, 1) for s in lead):
            return Refusal("its weight or bias is not one number per column")
    return None


def _check_steps(op: Activation) -> Refusal | None:
    """Refuse stored inputs, steps that the kernel does not know, and operands of other shapes."""
    if op.x_params is not None:
        return Refusal("its input is stored")
    steps, glu = _steps(op), _glu(op)
    halved = glu is None or (not op.extras and isinstance(shape_of(op.x)[-1], int))
    if not all(map(is_plain, steps)) or not halved:
        return Refusal(f"it does not know all of {op.epilogue}")
    if len(steps) > MOST_STEPS or len(op.extras) > MOST_EXTRAS:
        return Refusal("it has too many steps")
    for extra in op.extras:
        if dtype_of(extra) not in FLOATS:
            return Refusal(f"an operand is {dtype_name(dtype_of(extra))}")
        if not same_shape(shape_of(extra), shape_of(op.x)):
            return Refusal("an operand is spread over the input, or the input over it")
    return None


def _vector(node: Node | None, rw: Rewriter) -> Node | None:
    """Return a vector in the type that the kernel reads, converted now if it is a constant."""
    return None if node is None else typed(node, torch.float32, rw)
