"""The other operand of a sum or product with a fused op, as operands of its epilogue."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops.constants import constant_value
from qfuse.ir.ops.convolution import FusedConvolution
from qfuse.ir.ops.epilogue import Stored
from qfuse.ir.ops.linear import FusedLinear
from qfuse.ir.ops.matmul import FusedMatmul
from qfuse.ir.ops.product import FusedProduct, kind_of
from qfuse.ir.ops.qdq import as_dequantize
from qfuse.ir.ops.views import QuantParams, dtype_of, shape_of, tensor_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.ir.sizes import Size, is_one, is_row_major, same_shape, same_size, same_strides
from qfuse.rewrite.prelude import Miss, MissCode, Node, Rewriter

# An op with a number computes in at least one of these, so the number is not rounded to less, as a
# tensor of a narrower dtype would be.
_EXACT = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Filled:
    """A constant operand whose elements are all one number."""

    number: float
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EpilogueOperand:
    """An operand of an epilogue op.

    Attributes:
        value: A tensor, or what to fill one with.
        params: Its quantization parameters, if it is stored quantized.
    """

    value: Node | Filled
    params: QuantParams | None = None

    def stored(self, at: int) -> Stored | None:
        """Return the parameters of a stored operand whose index is ``at``."""
        if self.params is None:
            return None
        zero = None if self.params.zero_point is None else at + 2
        return Stored(at + 1, zero, self.params.spec)

    def extras(self, rw: Rewriter) -> tuple[Node, ...]:
        """Return the nodes to append to the epilogue operands; a number becomes a constant."""
        if isinstance(self.value, Filled):
            known = torch.full(self.value.shape, self.value.number, dtype=self.value.dtype)
            return (rw.constant(known, "number"),)
        return self.nodes

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of an operand that is a node itself."""
        assert isinstance(self.value, Node), "a number has to become a constant first"
        return (self.value, *(() if self.params is None else self.params.tensors))


def operand_of(node: Node, fused: FusedProduct, other: object, word: str) -> EpilogueOperand | Miss:
    """Return the other operand of ``node``, a sum or product with ``fused``.

    Args:
        node: The sum or product.
        fused: The fused op, one of its operands.
        other: The other operand.
        word: What a message calls it.

    Refuses: the op itself; integers; numbers that a narrow dtype rounds; another shape than that of
    the op, except for one value per channel or feature, and for a matmul any that broadcasts; a
    result whose axes are in another memory order than those of the op.
    """
    if other is fused.node:
        text = "the {} is combined with itself"
        return Miss(MissCode.SHARED, node, text, kind_of(fused), progress=3)
    if not isinstance(other, Node) or not isinstance(other.meta["val"], torch.Tensor):
        return _number(node, fused, other, word)
    filled = _filled(fused, other)
    if filled is not None:
        return EpilogueOperand(filled)
    if not dtype_of(other).is_floating_point:
        return Miss(MissCode.DTYPE, other, "the {} is {}", word, dtype_of(other), progress=3)
    shape = tuple(shape_of(other))
    refusal = refuse_shape(fused, other, shape, word) or _refuse_strides(fused, node)
    return refusal or stored_operand(other) or EpilogueOperand(other)


def _number(node: Node, fused: FusedProduct, other: object, word: str) -> EpilogueOperand | Miss:
    real = dtype_of(fused.node)
    plain = isinstance(other, (int, float)) and not isinstance(other, bool)
    if plain and (real in _EXACT or _is_exact(float(other), real)):  # type: ignore[arg-type]
        filled = Filled(float(other), real, _features(fused))  # type: ignore[arg-type]
        return EpilogueOperand(filled)
    return Miss(MissCode.ARGUMENT, node, "the {} is a number", word, progress=3)


def _is_exact(number: float, dtype: torch.dtype) -> bool:
    return torch.tensor(number, dtype=dtype).item() == number


def minus_one(fused: FusedProduct) -> EpilogueOperand:
    """Return the factor that negates the values of ``fused``, which is exact."""
    return EpilogueOperand(Filled(-1.0, dtype_of(fused.node), _features(fused)))


def _features(fused: FusedProduct) -> tuple[int, ...]:
    """Return the shape of a number as an operand: the kernels of linears read it per feature."""
    return (int(shape_of(fused.weight)[0]),) if isinstance(fused, FusedLinear) else ()


def _filled(fused: FusedProduct, other: Node) -> Filled | None:
    """View a constant of one element as a number, where the kernels do not read it as it is."""
    value, real = constant_value(other), dtype_of(fused.node)
    if value is None or value.numel() != 1 or value.dtype is torch.bool or value.is_complex():
        return None
    linear = isinstance(fused, FusedLinear)
    if value.dim() == 0:
        # It does not take part in type promotion, and is rounded to the dtype of the result.
        if (linear and value.dtype == real) or (value.dtype != real and real in _EXACT):
            return Filled(float(value), real, _features(fused))
        return None
    reads = linear and value.is_floating_point() and value.dim() <= len(shape_of(fused.node))
    return Filled(float(value), value.dtype, _features(fused)) if reads else None


def refuse_shape(
    fused: FusedProduct, other: Node, shape: tuple[Size, ...], word: str
) -> Miss | None:
    """Refuse an operand ``other`` that is read in a shape which no kernel broadcasts.

    Args:
        fused: The op, whose result has the shape to broadcast to.
        other: The operand.
        shape: The shape that it is read in.
        word: What a message calls it.
    """
    mine = tuple(shape_of(fused.node))
    if same_shape(shape, mine):
        return None
    if not _broadcasts(fused, shape, mine):
        text = "a {} of shape {} for a {} of shape {}"
        return Miss(MissCode.SHAPE, other, text, word, shape, kind_of(fused), mine, progress=3)
    if not shape and dtype_of(other) != dtype_of(fused.node):
        # Whether torch rounds a scalar to the result's dtype depends on its side of the operator.
        text = "a scalar {} of {} for values of {}"
        types = dtype_name(dtype_of(other)), dtype_name(dtype_of(fused.node))
        return Miss(MissCode.DTYPE, other, text, word, *types, progress=3)
    return None


def _broadcasts(fused: FusedProduct, shape: tuple[Size, ...], mine: tuple[Size, ...]) -> bool:
    """Whether a shape broadcasts to that of the op in a way that its kernels read in place.

    For a convolution, one value per image and channel, or fewer; for a linear, one per feature; for
    a matmul, as in torch.
    """
    if len(shape) > len(mine):
        return False
    padded = (*(1,) * (len(mine) - len(shape)), *shape)
    if isinstance(fused, FusedMatmul):
        return all(is_one(a) or same_size(a, b) for a, b in zip(padded, mine, strict=True))
    if isinstance(fused, FusedConvolution):
        return all(
            same_size(size, 1) or (at <= fused.axis and same_size(size, own))
            for at, (size, own) in enumerate(zip(padded, mine, strict=True))
        )
    return same_size(padded[-1], mine[-1]) and all(same_size(size, 1) for size in padded[:-1])


def _refuse_strides(fused: FusedProduct, node: Node) -> Miss | None:
    """Refuse a result whose axes are in another memory order than those of ``fused``.

    The order is that of the first operand, which in an epilogue is the op.
    """
    before, after = tensor_of(node), tensor_of(fused.node)
    if same_strides(before, after) or (is_row_major(before) and is_row_major(after)):
        return None
    text = "the strides of the result would change from {} to {}"
    details = before.stride(), after.stride()
    return Miss(MissCode.SHAPE, node, text, *details, progress=3)


def stored_operand(other: Node) -> EpilogueOperand | None:
    """View a dequantize with one constant scale as an operand that is stored quantized."""
    dequantize = as_dequantize(other)
    if dequantize is None or dequantize.params.outer_scale is not None:
        return None
    values = [constant_of(part) for part in dequantize.params.tensors]
    known = all(value is not None and value.numel() == 1 for value in values)
    return EpilogueOperand(dequantize.q, dequantize.params) if known else None
