"""The work of an op: as its kernel was costed, or from the operands of an op of ATen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.fx import Node

from qfuse.cost import AtPoints, ComputeKind, CostModel, Work, Workload
from qfuse.ir.aten import aten
from qfuse.ir.graph.schema import overload_of

_KINDS = {torch.float32: ComputeKind.F32, torch.bfloat16: ComputeKind.BF16}

_Operands = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class OpWork:
    """The work of an op on one machine.

    Attributes:
        predicted: Its time by the cost model, in seconds.
        roofline: The part of that time that the hardware needs, without call overhead, in seconds.
        operations: Multiplications and additions.
        bytes: Bytes read and written.
    """

    predicted: float
    roofline: float
    operations: float
    bytes: float

    @classmethod
    def of(cls, plan: Workload, cost: CostModel) -> OpWork:
        """Return the work of a plan at its hinted sizes."""
        works = [plan] if isinstance(plan, (Work, AtPoints)) else list(plan)
        hinted = [work.hint if isinstance(work, AtPoints) else work for work in works]
        estimates = [cost.estimate(work) for work in hinted]
        return cls(
            predicted=sum(e.seconds for e in estimates),
            roofline=sum(max(e.compute, e.memory) for e in estimates),
            operations=sum(work.flops for work in hinted),
            bytes=sum(work.weight_bytes + sum(work.reads) + sum(work.writes) for work in hinted),
        )


def aten_work(
    node: Node, operands: dict[Node, torch.Tensor], result: object, weights: frozenset[Node]
) -> Work | None:
    """Return the work of an op of ATen; ``None`` if there is no model of it.

    Modelled are products and convolutions in float32 and bfloat16, elementwise ops and copies.

    Args:
        node: The call.
        operands: The values of its tensor operands.
        result: What it returned.
        weights: The nodes of constants.
    """
    op = overload_of(node)
    if op is None or not isinstance(result, torch.Tensor) or not operands:
        return None
    if _is_view(result, operands.values()):
        return None
    moved = Work(
        weight_bytes=sum(_stored(x) for n, x in operands.items() if n in weights),
        reads=tuple(_stored(x) for n, x in operands.items() if n not in weights),
        writes=(_stored(result),),
    )
    if torch.Tag.pointwise in op.tags or op in _COPIES:
        return moved
    count = _PRODUCTS.get(op)
    kind = _KINDS.get(result.dtype)
    if count is None or kind is None:
        return None
    tensors = [operands[n] for n in node.args if isinstance(n, Node) and n in operands]
    flops, one_row = count(tensors, result)
    return Work(
        flops,
        kind,
        moved.weight_bytes,
        moved.reads,
        moved.writes,
        one_row_flops=min(one_row, flops),
    )


def _stored(value: torch.Tensor) -> float:
    """Return the bytes of the distinct elements of ``value``."""
    sizes = zip(value.shape, value.stride(), strict=True)
    return float(prod(size for size, step in sizes if step or size == 0) * value.element_size())


def _is_view(result: torch.Tensor, operands: object) -> bool:
    pointers = {x.untyped_storage().data_ptr() for x in operands}  # type: ignore[attr-defined]
    return result.untyped_storage().data_ptr() in pointers


def _product(left: int) -> Callable[[_Operands, torch.Tensor], tuple[float, float]]:
    """Return a function that counts a matrix product whose left operand has position ``left``."""

    def count(operands: _Operands, result: torch.Tensor) -> tuple[float, float]:
        depth = operands[left].shape[-1]
        rows = result.shape[-2] if result.dim() > 1 else 1
        flops = 2.0 * result.numel() * depth
        # Every matrix of a batch has a first row.
        return flops, flops / max(rows, 1)

    return count


def _linear(operands: _Operands, result: torch.Tensor) -> tuple[float, float]:
    depth = operands[0].shape[-1]
    one_row = 2.0 * depth * result.shape[-1] if result.numel() else 0.0
    return 2.0 * result.numel() * depth, one_row


def _convolution(operands: _Operands, result: torch.Tensor) -> tuple[float, float]:
    return 2.0 * result.numel() * operands[1][0].numel(), 0.0


_COPIES = frozenset(
    {
        aten._to_copy.default,
        aten.cat.default,
        aten.clone.default,
        aten.contiguous.default,
        aten.copy.default,
        aten.to.dtype,
        aten.to.dtype_layout,
    }
)

_PRODUCTS = {
    aten.addmm.default: _product(1),
    aten.baddbmm.default: _product(1),
    aten.bmm.default: _product(0),
    aten.conv1d.default: _convolution,
    aten.conv2d.default: _convolution,
    aten.conv3d.default: _convolution,
    aten.linear.default: _linear,
    aten.matmul.default: _product(0),
    aten.mm.default: _product(0),
}
