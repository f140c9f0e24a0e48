"""What the kernel rows share that take the op behind a linear too."""

from __future__ import annotations

from collections.abc import Sequence

from torch._ops import OpOverloadPacket
from torch.fx.node import Argument

from qfuse.cost.sizes import AtPoints, at_points
from qfuse.cost.work import Bits, ComputeKind, Work, linear_work
from qfuse.lower.expand.expand import results_of
from qfuse.lower.kernel.operands import bits_of, float_out, output_args, takes_output
from qfuse.lower.kernel.protocol import Refusal
from qfuse.lower.linear_rowwise.match import Pair
from qfuse.lower.rowwise.problem import check_output
from qfuse.lower.rowwise.problem import output_args as row_output_args
from qfuse.rewrite.prelude import Node, Rewriter

# The kernel's own pieces are smaller still.
_PIECES = 64


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
