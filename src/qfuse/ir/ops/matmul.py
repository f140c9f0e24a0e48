"""Views of products of two tensors: ATen's, and the fused quantized op."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch.fx import Node

from qfuse.ir.aten import aten
from qfuse.ir.graph.schema import arguments, is_call
from qfuse.ir.ops.declare import Op, define_op
from qfuse.ir.ops.epilogue import Epilogue
from qfuse.ir.ops.views import QuantParams, dtype_of, node_of, shape_of
from qfuse.ir.sizes import Size, broadcast_shape, same_size

MATMULS: tuple[OpOverload, ...] = (aten.matmul.default, aten.bmm.default, aten.mm.default)
"""Every op that multiplies two tensors of matrices."""

_MATRIX = 2


@dataclass(frozen=True, slots=True)
class Matmul:
    """A product ``x @ other``, with the broadcasting of ``torch.matmul``."""

    node: Node
    x: Node
    other: Node


def as_matmul(value: object) -> Matmul | None:
    """View ``value`` as a product of two tensors, or ``None``."""
    if not isinstance(value, Node) or not is_call(value, *MATMULS):
        return None
    a = arguments(value)
    return Matmul(value, node_of(a["self"]), node_of(a["mat2" if "mat2" in a else "other"]))


@define_op("matmul")
@dataclass(frozen=True, slots=True)
class FusedMatmul(Op):
    """A ``qfuse::matmul`` call: a product of two tensors that are computed at run time.

    ``x`` is ``[*batch, M, K]`` and ``other`` is ``[*batch, K, N]``. Batch axes broadcast, and the
    result has strides, as in ``torch.matmul``. Operands without quantization parameters are float.
    """

    x: Node
    x_params: QuantParams | None
    other: Node
    other_params: QuantParams | None
    out_params: QuantParams | None
    epilogue: Epilogue
    extras: tuple[Node, ...]

    @staticmethod
    def reference(
        x: torch.Tensor,
        other: torch.Tensor,
        epilogue: Epilogue,
        extras: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Multiply, and apply the epilogue, whose operands broadcast as in torch."""
        return epilogue.apply(torch.matmul(x, other), extras)

    @property
    def batch(self) -> tuple[Size, ...] | None:
        """The batch axes of the result; ``None`` if those of the operands do not broadcast."""
        return broadcast_shape(shape_of(self.x)[:-_MATRIX], shape_of(self.other)[:-_MATRIX])

    def problems(self) -> Iterator[str]:
        """Check that the operands are matrices, or batches of matrices, that fit each other."""
        x, other = shape_of(self.x), shape_of(self.other)
        if min(len(x), len(other)) < _MATRIX:
            yield f"operands of rank {len(x)} and {len(other)}"
            return
        if not same_size(x[-1], other[-_MATRIX]) or self.batch is None:
            yield f"a product of {tuple(x)} and {tuple(other)}"
        params = self.other_params
        right = dtype_of(self.other) if params is None else params.spec.float_dtype
        if right != self.float_dtype:
            yield f"the left operand is computed in {self.float_dtype}, the right one in {right}"


as_fused_matmul = FusedMatmul.of
