"""qfuse's own int8 linear: stored numbers in, scales and the whole epilogue in the same pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from qfuse.cost.sizes import at_points
from qfuse.cost.work import Bits, ComputeKind, Work, linear_work
from qfuse.ir.constants import constant_value
from qfuse.ir.known import bounds_of
from qfuse.ir.program import constant_of
from qfuse.ir.quant_spec import ZeroPointDomain, dtype_range
from qfuse.ir.views import shape_of
from qfuse.lower.expand import results_of
from qfuse.lower.kernel import Claim, LinearProblem, Refusal, split_epilogue
from qfuse.lower.operands import (
    bits_of,
    channel_granularity,
    check_bias,
    check_edge,
    check_epilogue,
    check_extras,
    check_rows,
    check_zero_point,
    fits_int32,
    float_out,
    is_whole,
    scale_node,
    scale_vector,
    typed,
)
from qfuse.lower.packing import signed_zero_point
from qfuse.lower.row_problem import check_output
from qfuse.lower.row_problem import output_args as row_output_args

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._ops import OpOverloadPacket
    from torch.fx import Node
    from torch.fx.node import Argument

    from qfuse.cost.sizes import AtPoints
    from qfuse.ir.views import FusedLinear, QuantParams
    from qfuse.kernels import KernelLibrary
    from qfuse.lower.packing import Packer
    from qfuse.lower.pairs import Pair
    from qfuse.rewrite.rewriter import Rewriter
    from qfuse.targets.target import Target

__all__ = [
    "LinearW8A8",
    "call_pair",
    "check_activation",
    "check_pair_output",
    "is_stored_at_once",
    "output_args",
    "pair_work",
    "stored_zero",
    "takes_output",
]

_BYTES = (torch.int8, torch.uint8)
_REALS = (torch.float32, torch.bfloat16, torch.float16)
# The kernel's own pieces are smaller still.
_PIECES = 64
# Sums are 32 bits wide: these many products of two bytes cannot overflow them.
_MOST_K = 1 << 16
_MOST_K_WITH_ZERO = 1 << 15


@dataclass(frozen=True, slots=True)
class LinearW8A8:
    """The row of ``qfuse::linear_w8a8``, ``linear_w8a8_quantized`` and ``linear_w8a8_rows``.

    Attributes:
        library: The compiled kernels, or why there are none.
        packer: Packs weights, for all rows of a lowering.
    """

    library: KernelLibrary
    packer: Packer
    name: str = "qfuse.linear_w8a8"

    def supported(self, target: Target) -> Refusal | None:
        """Refuse where the kernels could not be built."""
        if target.device != "cpu":
            return Refusal(f"it is a CPU kernel, the target is {target.device}")
        return None if self.library.available else Refusal(self.library.reason)

    def accepts(self, problem: LinearProblem) -> Claim | Refusal:
        """Take 8-bit activations per tensor or per row, 8-bit weights per tensor or channel."""
        for check in (check_activation, _check_weight, check_bias, check_epilogue):
            refusal = check(problem)
            if refusal is not None:
                return refusal
        fused = problem.fused
        output = fused.out_params is not None and takes_output(fused)
        return Claim(len(fused.epilogue.steps), output, _work(problem, output))

    def emit(self, problem: LinearProblem, claim: Claim, rw: Rewriter) -> Node:
        """Add the call with packed constants."""
        fused = problem.fused
        taken, _ = split_epilogue(problem, claim)
        args = [*self._operands(problem, rw), list(fused.extras) or None, str(taken), problem.real]
        if not claim.output:
            return rw.call(torch.ops.qfuse.linear_w8a8.default, *args, float_out(fused))
        assert fused.out_params is not None, "the claim covers the output"
        return rw.call(
            torch.ops.qfuse.linear_w8a8_quantized.default, *args, *output_args(fused.out_params, rw)
        )

    def accepts_pair(self, pair: Pair) -> Claim | Refusal:
        """Take the same linears, with a product of halves, and codes with a scale for each row."""
        problem = pair.problem
        for check in (check_activation, _check_weight, check_bias, check_extras):
            refusal = check(problem)
            if refusal is not None:
                return refusal
        refusal = check_pair_output(pair)
        if refusal is not None:
            return refusal
        return Claim(0, pair.rows is not None, pair_work(pair, problem.k, 8))

    def emit_pair(self, pair: Pair, rw: Rewriter) -> dict[int, Node]:
        """Add the call with packed constants."""
        problem = pair.problem
        fused = problem.fused
        operands = self._operands(problem, rw, halves=pair.halved)
        args = [*operands, list(fused.extras) or None, pair.steps, problem.real]
        kernels = torch.ops.qfuse
        ops = (kernels.linear_w8a8, kernels.linear_w8a8_quantized, kernels.linear_w8a8_rows)
        return call_pair(pair, args, ops, rw)

    def _operands(
        self, problem: LinearProblem, rw: Rewriter, *, halves: bool = False
    ) -> list[Argument]:
        fused = problem.fused
        x, w = fused.x_params, fused.weight_params
        assert x is not None, "accepted without activation params"
        assert w is not None, "accepted without weight params"
        packed = self.packer.pack(fused.weight, w, halves=halves)
        name, zero = fused.weight.target, packed.zero_point
        return [
            fused.x,
            scale_node(x, rw),
            None if x.zero_point is None else stored_zero(x.zero_point, x.spec.dtype, rw),
            rw.constant(packed.weight, f"{name}_packed"),
            rw.constant(packed.sums, f"{name}_sums"),
            scale_vector(w, torch.float32, problem.n, rw),
            None if zero is None else rw.constant(zero, f"{name}_zero"),
            None if fused.bias is None else typed(fused.bias, torch.float32, rw),
        ]


def call_pair(
    pair: Pair, args: Sequence[Argument], ops: Sequence[OpOverloadPacket], rw: Rewriter
) -> dict[int, Node]:
    """Add the call of a pair; return the results of the op behind the linear by index.

    Args:
        pair: The linear and the op.
        args: Those that all kernels of the linear begin with.
        ops: The kernels that give floats, codes with given parameters, and codes of rows.
        rw: Adds the call.
    """
    fused, rows = pair.problem.fused, pair.rows
    real, quantized, of_rows = (op.default for op in ops)
    if rows is None:
        return {0: rw.call(real, *args, float_out(fused))}
    if is_stored_at_once(pair):
        assert fused.out_params is not None, "its parameters are given"
        return {0: rw.call(quantized, *args, *output_args(fused.out_params, rw))}
    call = rw.call(of_rows, *args, rows.spec.real, *row_output_args(rows))
    results = [*results_of(pair.op.node)]
    if pair.shared:
        results.append(pair.kept_at)
    return {index: rw.item(call, rows.kernel_result(index)) for index in results}


def stored_zero(zero: Node, dtype: torch.dtype, rw: Rewriter) -> Node:
    """Return a zero point as the kernel reads it, which raises for what is no stored number.

    A zero point that was chosen from NaN is an arbitrary integer. Its scale is NaN, and so is the
    result of its row, but the rows of others must not be lost with it.
    """
    wide = typed(zero, torch.int32, rw)
    low, high = dtype_range(dtype)
    bounds = bounds_of(zero, look=False)
    inside = bounds is not None and low <= bounds[0] and bounds[1] <= high
    if inside or constant_value(zero) is not None:
        return wide
    return rw.call(torch.ops.aten.clamp.default, wide, low, high)


def check_activation(problem: LinearProblem) -> Refusal | None:
    """Refuse activations that are no bytes with a scale, or one per row."""
    params = problem.fused.x_params
    if params is None:
        return Refusal("the activation is not quantized")
    if params.spec.dtype not in _BYTES:
        return Refusal(f"the activation is stored as {params.spec.dtype}")
    if problem.real not in _REALS:
        return Refusal(f"the linear computes in {problem.real}")
    return (
        check_rows(problem)
        or check_edge(params, "activation")
        or check_zero_point(params, "activation")
    )


def _check_weight(problem: LinearProblem) -> Refusal | None:
    granularity = channel_granularity(problem)
    if isinstance(granularity, Refusal):
        return granularity
    params = problem.fused.weight_params
    assert params is not None, "a granularity needs params"
    if params.spec.dtype not in _BYTES:
        return Refusal(f"the weight is stored as {params.spec.dtype}")
    parts = (problem.fused.weight, params.scale, params.zero_point)
    if any(p is not None and constant_of(p) is None for p in parts):
        return Refusal("the weight or its parameters are computed at run time")
    return (
        check_edge(params, "weight") or check_zero_point(params, "weight") or _check_depth(problem)
    )


def _check_depth(problem: LinearProblem) -> Refusal | None:
    stored, params = problem.weight, problem.fused.weight_params
    assert stored is not None, "it is a constant"
    assert params is not None, "a granularity needs params"
    # Bytes without a sign are packed as signed ones, and have a zero point then.
    most = _MOST_K if signed_zero_point(stored, params) is None else _MOST_K_WITH_ZERO
    if problem.k > most:
        return Refusal(f"{problem.k} input features could overflow its sums, {most} cannot")
    return None


def takes_output(fused: FusedLinear) -> bool:
    """Whether the kernel quantizes its output; if not, ATen does behind it."""
    params = fused.out_params
    assert params is not None, "the output is quantized"
    spec = params.spec
    return (
        spec.dtype in _BYTES
        and check_edge(params, "output") is None
        and is_whole(spec.block, shape_of(fused.node))
        and spec.arithmetic.compute is torch.float32
        and spec.domain is not ZeroPointDomain.FLOAT_OFFSET
        and constant_of(params.scale) is not None
        and (params.zero_point is None or fits_int32(params.zero_point))
    )


def output_args(params: QuantParams, rw: Rewriter) -> list[Argument]:
    """Return how a result is quantized, in the order of the schemas."""
    spec = params.spec
    zero = None if params.zero_point is None else typed(params.zero_point, torch.int32, rw)
    math = spec.arithmetic
    return [
        params.scale,
        zero,
        spec.quant_min,
        spec.quant_max,
        math.reciprocal,
        math.zero_point_first,
        spec.dtype,
    ]


def _work(problem: LinearProblem, output: bool) -> AtPoints[Work]:
    bits = Bits(8, 8, 8 if output else bits_of(float_out(problem.fused)))
    return linear_work(problem.rows, problem.k, problem.n, bits, ComputeKind.INT8)


def check_pair_output(pair: Pair) -> Refusal | None:
    """Refuse codes of rows that no kernel makes."""
    if pair.rows is None or is_stored_at_once(pair):
        return None
    return check_output(pair.rows)


def is_stored_at_once(pair: Pair) -> bool:
    """Whether a block of columns becomes codes at once, without the rest of the row."""
    given = pair.problem.fused.out_params is not None and not pair.op.output.keep
    return given and takes_output(pair.problem.fused)


def pair_work(pair: Pair, depth: int, weight_bits: int) -> list[AtPoints[Work]]:
    """Return the work of the linear, and of encoding strips of rows that are in a cache.

    Args:
        pair: The linear and the op behind it.
        depth: Input features, with what else costs as much as one.
        weight_bits: Of one stored weight.
    """
    problem, columns, rows = pair.problem, pair.columns, pair.rows
    stored = rows is not None and is_stored_at_once(pair)
    in_strips = rows is not None and not stored
    kept = rows is not None and bool(rows.output.keep)
    # The first result of an op that stores it is codes: what is kept has the type before that.
    bits = 8 if stored else bits_of(float_out(problem.fused) if rows is None else rows.spec.real)

    def linear(count: int) -> Work:
        stored_as = Bits(8, weight_bits, 0)
        work = linear_work(count, depth, problem.n, stored_as, ComputeKind.INT8).hint
        written = _strips(count * columns) if in_strips else (count * columns * bits / 8,)
        return work.moving(writes=written)

    def encoding(count: int) -> Work:
        size = count * columns
        written = (size, *([size * bits / 8] if kept else []))
        return Work(reads=_strips(size), writes=written, kernel_calls=0)

    plan = [at_points(linear, problem.rows)]
    return [*plan, at_points(encoding, problem.rows)] if in_strips else plan


def _strips(elements: int) -> tuple[float, ...]:
    """Return the bytes of floats in pieces, which stay in a cache whatever their sum is."""
    return (elements * 4 / _PIECES,) * _PIECES
