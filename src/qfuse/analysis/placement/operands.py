"""How an operand is quantized, seen through data movement."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from qfuse.ir.movement.registry import movement_of
from qfuse.ir.ops.casts import cast_source
from qfuse.ir.ops.constants import constant_params, constant_value
from qfuse.ir.ops.qdq import Dequantize, Quantize, as_dequantize, as_quantize
from qfuse.ir.ops.views import QuantParams, shape_of
from qfuse.ir.quant.block import covers
from qfuse.ir.quant.spec import Block
from qfuse.ir.refusal import Refusal

# Movements between a dequantize and its user; real models have up to four.
_MOST = 16


@dataclass(frozen=True, slots=True)
class Encoded:
    """A float operand that is a dequantize behind movements.

    Attributes:
        op: The dequantize.
        node: The operand.
        block: The block of its scales in the axes of ``node``; ``None`` if a movement mixes them.
    """

    op: Dequantize
    node: Node
    block: Block | None

    @property
    def params(self) -> QuantParams:
        """The parameters of the dequantize."""
        return self.op.params

    def varies(self, axis: int) -> bool:
        """Whether there is more than one scale along an axis of the operand."""
        if self.block is None:
            return False
        return not covers(self.block[axis], shape_of(self.node)[axis])

    @property
    def has_one_scale(self) -> bool:
        """Whether one scale covers the operand."""
        shape = shape_of(self.node)
        return self.block is not None and all(map(covers, self.block, shape))


def encoded(node: Node) -> Encoded | None:
    """View ``node`` as a dequantize behind movements and casts, or return ``None``."""
    path: list[Node] = []
    here = node
    for _ in range(_MOST):
        op = as_dequantize(here)
        if op is not None:
            return Encoded(op, node, _forward(op.params.spec.block, path))
        source = source_of(here)
        if source is None:
            return None
        path.append(here)
        here = source
    return None


def source_of(node: Node) -> Node | None:
    """Return the operand of a movement or a cast, or ``None`` for other ops."""
    moved = movement_of(node)
    return moved.source if moved is not None else cast_source(node)


def _forward(block: Block, path: list[Node]) -> Block | None:
    known: Block | None = block
    for node in reversed(path):
        moved = movement_of(node)
        if moved is None or known is None:
            continue
        after = moved.forward(known)
        known = None if isinstance(after, Refusal) else after.block
    return known


def static(params: QuantParams) -> bool:
    """Whether scale and zero point are constants."""
    return constant_params(params) is not None


def same_numbers(a: QuantParams, b: QuantParams) -> bool:
    """Whether two quantizations with one scale each are equal, whatever their rank and dtypes."""
    if a.spec != replace(b.spec, block=a.spec.block, arithmetic=a.spec.arithmetic):
        return False
    left, right = constant_params(a), constant_params(b)
    if left is None or right is None:
        return a.scale is b.scale and a.zero_point is b.zero_point
    return _number(left[0]) == _number(right[0]) and _zero(left[1]) == _zero(right[1])


def scale_text(params: QuantParams) -> str:
    """Format the scale and zero point of a quantization for a message."""
    known = constant_params(params)
    if known is None:
        return "parameters chosen at run time"
    scale, zero = known
    if scale.numel() != 1:
        return f"{scale.numel()} scales from {float(scale.min()):.3g} to {float(scale.max()):.3g}"
    return f"scale {float(scale.reshape(-1)[0]):.4g}, zero point {_zero(zero):.0f}"


def one_scale(params: QuantParams) -> float | None:
    """Return the constant scale if there is only one."""
    scale = constant_value(params.scale)
    return None if scale is None or scale.numel() != 1 else _number(scale)


def quantizes_below(node: Node) -> list[Quantize]:
    """Return the quantizes of ``node``, also behind movements and casts."""
    found: list[Quantize] = []
    stack, seen = [node], {node}
    while stack and len(seen) < _MOST * _MOST:
        for user in stack.pop().users:
            op = as_quantize(user)
            if op is not None:
                found.append(op)
            elif user not in seen and source_of(user) is not None:
                seen.add(user)
                stack.append(user)
    return found


def _number(value: torch.Tensor) -> float:
    # In float32: PT2E's scales are double literals, torchao's are float32.
    return float(value.reshape(-1)[0].to(torch.float32)) if value.numel() == 1 else float("nan")


def _zero(value: torch.Tensor | None) -> float:
    return 0.0 if value is None else _number(value)
